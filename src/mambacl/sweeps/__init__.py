"""Many runs: the runs of a file (`mambacl sweep`), and the search for good options (`mambacl tune`), on an engine."""
