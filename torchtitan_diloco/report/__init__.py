"""A page about one run or several, from what they have written: no training process, no torch and no network is needed."""
