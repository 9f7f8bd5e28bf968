"""A framework's verbs, said in ours; one file per framework, the only places that import it."""
