"""What a mesh is: layouts, processors, slices of tensors and of variables, redistribution."""
