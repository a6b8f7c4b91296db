"""Whether a step takes longer if tables are larger: `python -m benchmarks.sparse_tables`.

Steps of the recommender of the examples, with 1 million and with 20 million rows of its largest
table, on 8 virtual CPU devices; both take turns. Prints the median of each, the median ratio of
neighbours, and what a device holds of the tables.
"""

from __future__ import annotations

import argparse
import statistics
import time

from mesh_tensorflow.examples import mesh_flags, recommender


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  parser.add_argument("--most_rows", type=int, nargs=2, default=[1_000_000, 20_000_000])
  parser.add_argument("--steps", type=int, default=20)
  own, rest = parser.parse_known_args()
  models, data = [], None
  for rows in own.most_rows:
    args = recommender.parse_args([*rest, "--most_rows", str(rows)])
    layout = recommender.layout_of(args.mesh_shape)
    impl = mesh_flags.make_mesh_impl(args.mesh_shape, layout, args.implementation)
    models.append(recommender.Recommender(args, impl))
    data = data or recommender.draw_clicks(args)
  assert data is not None
  for model in models:
    model.train(next(data))
  seconds: list[tuple[float, ...]] = []
  for _ in range(own.steps):
    batch, turn = next(data), []
    for model in models:
      start = time.perf_counter()
      model.train(batch)
      turn.append(time.perf_counter() - start)
    seconds.append(tuple(turn))
  for rows, model, times in zip(own.most_rows, models, zip(*seconds)):
    sizes = model.bytes_by_device()
    share = max(sizes.values()) / sum(sizes.values())
    print(
      f"{rows:>10,} rows: {statistics.median(times) * 1e3:7.1f} ms a step; "
      f"{sum(sizes.values()) / 2**20:6.0f} MB of tables and slots, {share:.4f} of it on a device"
    )
  ratio = statistics.median(b / a for a, b in seconds)
  print(f"ratio of a step: {ratio:.3f}")


if __name__ == "__main__":
  main()
