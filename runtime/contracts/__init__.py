"""Data and protocols between the parts of the runtime, without behaviour.

 messages     gateway <-> engine: EngineRequest down, EngineOutput up
 plan         scheduler <-> executor: StepPlan down, StepResult up
 matcher      scheduler <-> constraint backend: masks, advance, rollback
 block_store  scheduler <-> stores of offloaded blocks, and transfer between engines

Numbers only: no torch, no sockets.
"""
