"""A mesh of devices that one program places operations on, behind `PlacementMeshImpl`."""
