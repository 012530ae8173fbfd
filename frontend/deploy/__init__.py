"""Rootlace on a Ray cluster, as an application of Ray Serve. Needs the extra `ray`.

    serve run rootlace.deploy:build model=Qwen/Qwen3-0.6B replicas=2

`rootlace.deploy:build` is also what a configuration of Serve names as its `import_path`; its `args`
are those of `app`.
"""

from rootlace.deploy.application import app, build

__all__ = ["app", "build"]
