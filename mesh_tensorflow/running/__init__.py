"""From a program and a layout to TensorFlow: lowering, functions, hooks, reports, eager tensors."""
