"""Islands on a store. (This name is temporary: it becomes `islands` when the old package goes.)

An island is a worker that is a job of its own. A run is a folder of objects in a store; each object
has one writer. One process, the syncer, decides everything. Islands tell it what they have, and do
what it has decided. This package is the rules, without tensors, store and clock:

| file | says |
|---|---|
| `names.py` | what objects are called, and which are garbage |
| `decision.py` | what the syncer decides: the state of a run |
| `note.py`, `changes.py` | what an island says, and what a person asks for |
| `commit.py` | how a decision begins to count, and when a stand-by takes over |
| `ledger.py` | which parts count |
| `presence.py` | who is there, and who has which slot |
| `rounds.py` | when a round opens and closes, and who is waited for |
| `uploads.py`, `writer.py` | objects and decisions on their way, and old ones |
| `syncer.py`, `jobs.py` | the syncer, and what it lets its threads do |
| `fragment.py` | when an island sends, applies and waits |
| `checkpoint.py`, `location.py` | from where it goes on, and whether that is its run |
| `island.py` | an island |

**Decisions** are created, never replaced, and hold the whole state. Everybody takes the highest.
Who creates number N and lists no higher one afterwards has decided; anybody else stands by. Safety
uses no clock, lease or epoch.

**Versions.** The syncer merges the parts of a round, makes an outer step on the true parameters
Theta, and publishes Theta - P, encoded. All add the same bytes to the published copy P. What is
rounded away stays in Theta - P.

**The ledger.** The samples of a slot are taken in order, in each fragment: merged, or lost. A part
begins where the ledger ends, and its base is at least the version with the slot's last part. So
each sample is merged at most once. What is refused stays in the parameters, and is sent again.

**Nothing waits for one.** A round closes when its grace is over, late parts go into the next, and
training waits for the grace of its own send at most. Without syncer or store all train on.

**Promises.** Same version, same bits on every island. Each range once. All work of an island that
is there is merged, at most four versions late. Nothing that an island writes harms more than its
own part. Each holds after `kill -9` of anybody at any moment. `tests/islands_store` shows it.
"""
