"""The API reference: pages of Markdown, made from the docstrings of the package as it is.

`pages()` is called when the site is built (`mkdocs_hook.py`); nothing of it is committed. Every
public name has a place: those right in `mtf` by families, which are the files that define them, the
others by the module that a user imports.
"""

from __future__ import annotations

import collections
import dataclasses
import importlib
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from docs.tools import docstrings, signatures

PACKAGE = "mesh_tensorflow"
TRANSFORMER = f"{PACKAGE}.transformer"

# Pages of the names right in `mtf`: title, what it is about, and the last words of the names of the
# files that define them. A file that no page has goes to the last page.
LANGUAGE = [
  ("Programs", "Dimensions, graphs, tensors, functions, variables.",
   "dimensions graph tensor operation scope function lowering variables assignments constants"
   " stacked_variable tensor_spec eager_session"),
  ("Elementwise", "Functions of each element: of one tensor, of two, and with numbers.",
   "elementwise binary scalar broadcasting comparison where"),
  ("Sums and products", "Einsum, reductions, softmax, the largest elements, running sums.",
   "einsum reduction softmax top_k ranges cross_entropy norms"),
  ("Shapes and places", "Reshaping, renaming, slicing, shifting, gathering.",
   "reshape slicing stacking shift indexing one_hot redistribute"),
  ("Convolutions", "Convolutions, transposed convolutions, and pooling.",
   "convolution pooling"),
  ("Fields", "Complex tensors, Fourier transforms, halos, scatter, sorting, linear algebra.",
   "complex fourier halo_reduce scatter sorting linear_algebra"),
  ("Random", "Random tensors, dropout, sampling.", "random"),
  ("Control and gradients", "Loops, gradients, own gradients, own functions, printing.",
   "gradients custom_gradient loops microbatches slicewise control"),
  ("Layouts and meshes", "What is split over what; devices; where variables live; reports.",
   "layout processors mesh_impl placement_mesh_impl simd_mesh_impl tpu_mesh_impl laid_out store"
   " devices virtual_devices hooks report describe auto_layout"),
  ("Models of TensorFlow", "A tf.function, Keras model or tf.Module on named dimensions.",
   "imported"),
  ("Errors", "Every error is an `mtf.MeshError`.", "errors"),
]  # fmt: skip
OTHER = ("More of the language", "What stands right in `mtf` besides.")

# Modules that programs import, or reach as `mtf.<name>`.
MODULES = (
  "layers",
  "optimize",
  "sparse",
  "keras",
  "initializers",
  "auto_mtf",
  "bert.bert",
  "bert.convert",
  "bert.create_pretraining_data",
  "bert.make_vocab",
  "bert.optimization",
  "bert.run_classifier",
  "bert.run_pretraining",
  "bert.run_squad",
  "bert.tokenization",
  "bert.training",
  "experimental.data_aug_lib",
  "experimental.input_reader",
  "experimental.model_executor",
  "experimental.offline_data_aug",
  "experimental.unet",
  "experimental.volumes",
  "beam_search",
  "checkpoint",
  "workers",
  "tpu_mesh",
  "tpu_variables",
  "exit_codes",
  "planning",
  "placement_mesh_impl",
  "simd_mesh_impl",
  "utils",
  "test_utils",
)
# Packages of the Transformer whose names programs and gin files use; all its modules are public.
TRANSFORMER_PACKAGES = ("gin_config",)


@dataclasses.dataclass(frozen=True)
class Name:
  """A public name.

  Attributes:
    module: the module that a user takes it from.
    name: its name there.
    value: what it is.
  """

  module: str
  name: str
  value: Any = dataclasses.field(hash=False, compare=False)

  @property
  def anchor(self) -> str:
    return f"{self.module}.{self.name}"

  @property
  def shown(self) -> str:
    """As programs write it."""
    module = self.module.removeprefix(f"{TRANSFORMER}.")
    if module == self.module:
      module = "mtf" + self.module.removeprefix(PACKAGE)
    return f"{module}.{self.name}"


def public_modules() -> list[str]:
  """Names of the modules that have a page of their own."""
  found = [f"{PACKAGE}.{name}" for name in MODULES]
  transformer = importlib.import_module(TRANSFORMER)
  for info in pkgutil.iter_modules(transformer.__path__):
    if not info.name.startswith("_") and (not info.ispkg or info.name in TRANSFORMER_PACKAGES):
      found.append(f"{TRANSFORMER}.{info.name}")
  return found


def public_names(module_name: str) -> list[Name]:
  """The public names of a module: `__all__`, else what it defines, else what it gives names to."""
  module = importlib.import_module(module_name)
  values = {
    n: v
    for n, v in vars(module).items()
    if not n.startswith("_") and not isinstance(v, types.ModuleType)
  }
  of_package = {n: v for n, v in values.items() if _defined_in(v).startswith(PACKAGE)}
  own = {n: v for n, v in of_package.items() if _defined_in(v) == module_name}
  if module_name == PACKAGE:
    chosen = of_package
  elif hasattr(module, "__all__"):
    chosen = {n: values[n] for n in module.__all__ if n in values}
  else:
    chosen = own or of_package
  return [Name(module_name, n, chosen[n]) for n in sorted(chosen, key=str.lower)]


def all_names() -> list[Name]:
  """Every public name, of `mtf` and of the public modules."""
  return [n for module in (PACKAGE, *public_modules()) for n in public_names(module)]


def pages() -> dict[str, str]:
  """The pages of the reference: path in the site to Markdown; the first is the index."""
  written: dict[str, str] = {}
  places: dict[str, str] = {}

  def add(path: str, title: str, intro: str, names: list[Name]) -> None:
    written[path] = _page(title, intro, names)
    places.update({n.anchor: path for n in names})

  families = _families(public_names(PACKAGE))
  for (title, intro), names in families.items():
    add(f"reference/{_slug(title)}.md", title, intro, names)
  for module in public_modules():
    title = module.removeprefix(f"{PACKAGE}.")
    names = public_names(module)
    if names:
      intro = docstrings.markdown(importlib.import_module(module).__doc__)
      add(f"reference/{title}.md", title, _importing(module) + intro, names)
  index = {"reference/index.md": _index(places, list(written))}
  return {**index, **written, "reference/gin.md": _gin_page()}


def navigation(paths: list[str]) -> list[dict[str, Any]]:
  """The part of the site's navigation that these pages are."""
  groups: dict[str, list[dict[str, str]]] = {"The language": [], "Modules": [], "Transformer": []}
  titles = {_slug(title): title for title, *_ in [*LANGUAGE, OTHER]}
  for path in paths:
    name = path.removeprefix("reference/").removesuffix(".md")
    if name in titles:
      groups["The language"].append({titles[name]: path})
    elif name.startswith("transformer."):
      groups["Transformer"].append({name.removeprefix("transformer."): path})
    elif name not in ("index", "gin"):
      groups["Modules"].append({name: path})
  nested: list[dict[str, Any]] = [{k: v} for k, v in groups.items()]
  return [{"All names": "reference/index.md"}, *nested, {"Gin": "reference/gin.md"}]


def _families(names: list[Name]) -> dict[tuple[str, str], list[Name]]:
  page_of = {file: (title, intro) for title, intro, files in LANGUAGE for file in files.split()}
  families: dict[tuple[str, str], list[Name]] = {(t, i): [] for t, i, _ in LANGUAGE}
  families[OTHER] = []
  for name in names:
    parts = _defined_in(name.value).split(".")
    file = next((p for p in reversed(parts) if p in page_of), "")
    families[page_of.get(file, OTHER)].append(name)
  return {key: found for key, found in families.items() if found}


def _defined_in(value: Any) -> str:
  module = getattr(value, "__module__", None)
  return module if isinstance(module, str) else ""


def _slug(title: str) -> str:
  return title.lower().replace(" ", "-")


def _importing(module: str) -> str:
  parent, _, name = module.rpartition(".")
  return f"```python\nfrom {parent} import {name}\n```\n\n"


def _page(title: str, intro: str, names: list[Name]) -> str:
  """A page: a section for each file that defines some of the names."""
  sections: dict[str, list[Name]] = collections.defaultdict(list)
  for name in names:
    sections[_defined_in(name.value)].append(name)
  lines = [f"# {title}", "", intro]
  for module in sorted(sections, key=lambda m: _title_of(m).lower()):
    if len(sections) > 1:
      lines += ["", f"## {_title_of(module)}", ""]
    for same in _same_values(sections[module]):
      lines += ["", *_entry(same)]
  return "\n".join(lines) + "\n"


def _title_of(module: str) -> str:
  """What a file is about: the first sentence of its docstring."""
  doc = sys.modules[module].__doc__ if module in sys.modules else None
  first = docstrings.summary(doc).split(". ")[0].removesuffix(".")
  return docstrings.escaped(first) or "Others"


def _same_values(names: list[Name]) -> Iterator[list[Name]]:
  """Names of one thing together, as `mtf.abs` and `mtf.mtf_abs`."""
  groups: dict[int, list[Name]] = {}
  for name in names:
    groups.setdefault(id(name.value), []).append(name)
  yield from groups.values()


def _entry(same: list[Name]) -> list[str]:
  """Heading, signature, docstring, and the methods of a class."""
  name = same[0]
  anchors = "".join(f'<a id="{n.anchor}"></a>' for n in same[1:])
  # The page says the module.
  heading = ", ".join(n.shown if n.module == PACKAGE else n.name for n in same)
  lines = [f"### {heading} {{#{name.anchor}}}", "", *([anchors, ""] if anchors else [])]
  value = name.value
  if not callable(value):
    return [*lines, f"```python\n{name.shown} = {signatures.default_text(value)[:300]}\n```", ""]
  lines += _code(signatures.signature_text(name.shown, value))
  lines += [docstrings.markdown(inspect.getdoc(value))]
  if isinstance(value, type):
    for method, member in _members(value):
      lines += ["", f"#### {method} {{#{name.anchor}.{method}}}", ""]
      if not isinstance(member, property):
        lines += _code(signatures.signature_text(method, member, is_method=True))
      lines += [docstrings.markdown(member.__doc__)]
  return lines


def _code(signature: str) -> list[str]:
  return [f"```python\n{signature}\n```", ""] if signature else []


def _members(cls: type) -> Iterator[tuple[str, Any]]:
  """Methods and properties with a docstring, that the class itself defines."""
  for name, member in sorted(vars(cls).items()):
    member = getattr(member, "__func__", member)  # Of static and class methods.
    described = inspect.isfunction(member) or isinstance(member, property)
    if not name.startswith("_") and described and member.__doc__:
      yield name, member


def _index(places: dict[str, str], paths: list[str]) -> str:
  lines = ["# API reference", ""]
  lines += ["Everything that programs may use, from its docstring. `mtf` is `mesh_tensorflow`.", ""]
  titles = {_slug(title): (title, intro) for title, intro, *_ in [*LANGUAGE, OTHER]}
  for path in paths:
    name = path.removeprefix("reference/").removesuffix(".md")
    doc = docstrings.summary(getattr(sys.modules.get(f"{PACKAGE}.{name}"), "__doc__", ""))
    title, about = titles.get(name, (name, doc))
    lines.append(f"- [{title}]({name}.md): {docstrings.escaped(about)}")
  lines += ["- [gin](gin.md): what gin files can bind.", "", "## All names", ""]
  for anchor, path in sorted(places.items(), key=lambda p: p[0].rpartition(".")[2].lower()):
    module, _, name = anchor.rpartition(".")
    where = "" if module == PACKAGE else f" ({module.removeprefix(f'{PACKAGE}.')})"
    lines.append(f"- [{name}]({path.removeprefix('reference/')}#{anchor}){where}")
  return "\n".join(lines) + "\n"


@dataclasses.dataclass(frozen=True)
class Configurable:
  """What gin files can bind: its module and name, the function or class, and its parameters."""

  module: str
  name: str
  value: Callable[..., Any] = dataclasses.field(compare=False)
  parameters: dict[str, Any] = dataclasses.field(compare=False)


def configurables() -> list[Configurable]:
  """All configurables of the package. A parameter without a default has `inspect._empty`."""
  import gin

  # The last is imported by the gin file that uses it.
  for module in (*public_modules(), f"{TRANSFORMER}.data.stdlib_text"):
    importlib.import_module(module)
  found = []
  # Gin has no public way to list what is registered.
  for selector, entry in gin.config._REGISTRY.items():
    value = entry.wrapped
    home = _defined_in(value)
    # Gin may register anything, where a file asks for it.
    if home.split(".")[0] != PACKAGE or ".gin_config." in home:
      continue
    signature = signatures.signature_of(value)
    parameters = {
      p.name: p.default
      for p in (signature.parameters.values() if signature else ())
      if p.name != "self" and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
      if not (entry.allowlist and p.name not in entry.allowlist)
      if not (entry.denylist and p.name in entry.denylist)
    }
    module = selector.rpartition(".")[0]
    found.append(Configurable(module, selector.rpartition(".")[2], value, parameters))
  return sorted(found, key=lambda c: (c.module, c.name.lower()))


def _gin_page() -> str:
  lines = ["# Gin", "", "What gin files and `--gin_param` can bind: `NAME.PARAMETER = VALUE`."]
  lines += ["Settings of the trainer, with what they mean: [settings](../settings.md)."]
  last = None
  for c in configurables():
    if c.module != last:
      last = c.module
      lines += ["", f"## {c.module.removeprefix(f'{PACKAGE}.')}", ""]
    bound = ", ".join(
      n if v is inspect.Parameter.empty else f"{n}={signatures.default_text(v)}"
      for n, v in c.parameters.items()
    )
    about = docstrings.escaped(docstrings.summary(inspect.getdoc(c.value)))
    lines.append(f"- `{c.name}({bound})`: {about}")
  return "\n".join(lines) + "\n"
