"""The engine process: a loop that receives, plans, runs, commits and sends.

 gateway: client/ --ZeroMQ--> core.EngineLoop -> Scheduler.plan -> Executor -> Scheduler.commit

`core` is the loop, `process` compiles constraints and reports to the gateway, `offload` opens the
offload levels, `client` is the gateway's end.
"""
