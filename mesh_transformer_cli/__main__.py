"""`python -m mesh_transformer_cli` is the command `mesh-transformer`."""

from mesh_transformer_cli.front import main

if __name__ == "__main__":
  main()
