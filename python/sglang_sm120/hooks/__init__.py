"""SGLang internals are touched here and nowhere else: one file per part, each declaring its targets."""
