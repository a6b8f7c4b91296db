"""Behind `SimdMeshImpl`: its devices, what they exchange data with, and the traced program."""
