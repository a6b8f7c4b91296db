"""Behind `StrategyMeshImpl` and `tpu_mesh`: topologies, and programs that run on each core."""
