"""The rules of islands, without tensors, store and clock.

An island is a worker that is a separate job. A run is a folder of objects in a store; each object
has one writer. One process, the syncer, makes all decisions. Islands report their state to it, and
follow its decisions. The files:

| file | contents |
|---|---|
| `names.py`, `fields.py` | names of objects, and which of them are garbage; types of values |
| `settings.py`, `founding.py` | settings of a run, and how it begins |
| `decision.py` | the decisions of the syncer: the state of a run |
| `history.py` | what has happened in it |
| `note.py`, `changes.py` | reports of an island, and requests of a person |
| `commit.py` | how a decision takes effect, and when a standby takes over |
| `ledger.py` | which parts count |
| `presence.py` | which islands are running, and their slots |
| `rounds.py` | when a round opens and closes, and for which islands it waits |
| `wrong_parts.py` | which islands repeatedly send wrong parts |
| `copies.py` | when the syncer writes copies |
| `writer.py` | objects and decisions in flight, and old ones |
| `syncer.py`, `jobs.py` | the syncer, and the jobs of its threads |
| `fragment.py` | when an island sends, applies and waits |
| `clock.py` | the tokens of the run, which its learning rate follows |
| `checkpoint.py` | from which copies an island resumes |
| `news.py` | messages of the syncer and of islands for users |
| `island.py` | an island |

**Decisions** are created, never replaced, and contain the whole state. All processes use the
highest. A process that creates number N and then lists no higher one has decided; all others stand
by. Safety uses no clock, lease or epoch.

**Versions.** The syncer merges the parts of a round, makes an outer step on the true parameters
Theta, and publishes Theta - P, encoded. All islands add the same bytes to the published copy P. The
rounding error stays in Theta - P.

**The ledger.** In each fragment, the samples of a slot are merged or lost, in order. A part starts
where the ledger ends, and its base is at least the version with the slot's last part. Each sample
is therefore merged at most once. Refused work stays in the parameters, and is sent again.

**Streams.** A slot is a stream of samples, which its owners read in turn. It enters a phase of the
data at a position that its owner reports, and the next decision contains. So each owner reads the
same samples.

**No island blocks the others.** A round closes when its grace period is over, late parts go into
the next one, and training waits at most for the grace period of its own send. Without syncer or
store, all islands keep training.

**What users see** follows from the newest decision, and `history/`: it contains what the syncer has
last seen of each owner, and the sums of the current ten minutes. No decision depends on it.

**Guarantees.** The same version has the same bits on every island. Each range is merged at most
once. If the uploads of a running island take less than H steps of the pacing island, all its work
is merged, at most four versions late. Whatever an island writes affects only its own part. All this
holds after `kill -9` of any process at any time (`tests/islands/rules`).
"""
