"""Studies of labelled data: runs, and what is read from them. Nothing here imports a framework."""
