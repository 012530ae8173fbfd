"""What parts of a layer may import; the layers stand in the table of docs/architecture.md."""

HEAVY = {"torch", "transformers", "safetensors", "triton"}
SERVING = {"aiohttp", "tokenizers", "jinja2"}

# Module prefix -> the prefixes of our own modules it may import (itself always).
MAY_IMPORT: dict[str, set[str]] = {
    # What `import rootlace` gives.
    "rootlace": {
        "rootlace.wire",
        "rootlace.language",
        "rootlace.client",
        "rootlace.program",
        "rootlace.timeline",
        "rootlace.trace",
    },
    "rootlace.cli.bench_load": {"rootlace.runtime.simulation"},
    "rootlace.runtime": set(),
    "rootlace.runtime.config": set(),
    "rootlace.runtime.processes": {"rootlace.runtime.config"},
    "rootlace.runtime.assets": set(),
    # The ranks of a model are processes.
    "rootlace.runtime.model.parallel": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.processes",
        "rootlace.runtime.contracts",
        "rootlace.runtime.model",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.parallel.shard": {"rootlace.runtime.model.families"},
    # A model is judged before anything heavy is imported.
    "rootlace.runtime.model.families": {"rootlace.wire"},
    "rootlace.runtime.model.options": {
        "rootlace.wire",
        "rootlace.runtime.config",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.checkpoint.eagle_head",
        "rootlace.runtime.model.parallel.shard",
    },
    "rootlace.runtime.model.checkpoint.eagle_head": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.checkpoint.quantised.layouts",
    },
    "rootlace.runtime.model.checkpoint.config": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.transformers_backend.config",
        "rootlace.runtime.model.checkpoint.source",
        "rootlace.runtime.model.checkpoint.quantised",
    },
    "rootlace.runtime.model.transformers_backend": {
        "rootlace.wire",
        "rootlace.runtime.contracts",
        "rootlace.runtime.model",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.hub": {
        "rootlace.wire",
        "rootlace.runtime.model.checkpoint.config",
        "rootlace.runtime.model.checkpoint.source",
        # Where the user's files are kept.
        "rootlace.kernels.native.build",
    },
    "rootlace.runtime.model.checkpoint.quantised.layouts": {"rootlace.wire"},
    "rootlace.runtime.model.checkpoint.quantised": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.quantised.layouts",
    },
    "rootlace.runtime.model.checkpoint.quantised.blocks": {"rootlace.kernels.codes"},
    "rootlace.runtime.model.checkpoint.quantised.reading": {
        "rootlace.runtime.model.checkpoint.quantised",
        "rootlace.runtime.model.gguf.file",
        "rootlace.kernels",
    },
    "rootlace.runtime.model.checkpoint.source": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.quantised",
        "rootlace.runtime.model.gguf",
    },
    "rootlace.runtime.model.gguf": {
        "rootlace.wire",
        "rootlace.runtime.model.families",
        "rootlace.runtime.model.checkpoint.quantised.layouts",
        "rootlace.kernels.native.build",
    },
}

# Module prefix -> third-party packages that it must not import.
MUST_NOT_IMPORT: dict[str, set[str]] = {
    "rootlace": HEAVY | SERVING | {"numpy", "zmq"},
    # Imported when that command runs, which needs the runtime's packages.
    "rootlace.cli.bench_load": HEAVY | {"numpy"},
    "rootlace.runtime": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.config": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.processes": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.assets": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.parallel": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.parallel.shard": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.families": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.transformers_backend": {"aiohttp", "zmq"},
    "rootlace.runtime.model.options": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.config": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.eagle_head": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.source": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.hub": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.quantised.layouts": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.quantised": HEAVY | SERVING | {"numpy"},
    "rootlace.runtime.model.checkpoint.quantised.blocks": HEAVY | SERVING | {"zmq"},
    "rootlace.runtime.model.checkpoint.quantised.reading": {"aiohttp", "transformers", "zmq"},
    "rootlace.runtime.model.gguf": HEAVY | SERVING | {"numpy"},
}
