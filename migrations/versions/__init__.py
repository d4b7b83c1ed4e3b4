"""One file a step, `NNNN_subject.py`, revision id `NNNN`: never edited once it is in a release."""
