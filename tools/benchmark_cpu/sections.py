"""What is measured: sections of things that are compared with one another."""

import dataclasses

import flashverify as fv
from flashverify.abba.case import KV_ELEMENT_BYTES, Case

ATTENTION, EAGER, APPEND = "attention", "torch_eager", "append"

FP32, HALF = "grouped_fp32", "grouped_half"
TORCH = "torch FP32 eager"
ONE_THREAD = f"{FP32}, 1 thread"
TINY_ATTENTION, TINY_APPEND = "paged_attention", "append_kv"


@dataclasses.dataclass(frozen=True)
class Subject:
    """One thing that is timed, with whatever differs from its section's conditions."""

    name: str
    kind: str = ATTENTION
    route: str = FP32
    threads: int | None = None
    isa: str | None = None
    kv_dtype: str | None = None


@dataclasses.dataclass(frozen=True)
class Section:
    """Subjects over one case. ``rated`` ones have the machine's rates measured beside them."""

    name: str
    case: Case
    subjects: tuple[Subject, ...]
    rated: bool = True

    def case_of(self, subject: Subject) -> Case:
        """The case as a subject runs it."""
        if subject.kv_dtype is None:
            return self.case
        return dataclasses.replace(self.case, kv_dtype=subject.kv_dtype)

    def shrunk(self, divisor: int) -> "Section":
        """The same over a context ``divisor`` times as short."""
        context = max(self.case.q_len, self.case.context // divisor)
        return dataclasses.replace(self, case=dataclasses.replace(self.case, context=context))


def all_sections() -> dict[str, Section]:
    """Every section, in the order of a round."""
    fp32 = Subject(FP32)
    half = Subject(HALF, route=HALF)
    eager = Subject(TORCH, kind=EAGER)
    arms = (fp32, half, eager)
    isas = tuple(Subject(f"{FP32}, {isa}", isa=isa) for isa in fv.available_cpu_isas())
    formats = tuple(
        Subject(f"{FP32}, {name}", kv_dtype=name)
        for name in KV_ELEMENT_BYTES
        if name != Case().kv_dtype
    )
    threads = (Subject(ONE_THREAD, threads=1),) if fv.get_num_threads() > 1 else ()
    batch = Case(batch=4, context=4096, q_len=8, q_heads=32, kv_heads=8, head_dim=128, page_size=16)
    tiny = Case(context=16, q_len=1, page_size=16)
    sections = (
        Section(
            "4k",
            Case(context=4 << 10),
            (*arms, Subject("scalar_fp32", route="scalar_fp32")),
        ),
        Section("16k", Case(context=16 << 10), (*arms, *isas)),
        Section("64k", Case(context=64 << 10), (*arms, *threads, *formats)),
        Section("256k", Case(context=256 << 10), arms),
        Section("256k_q1", Case(context=256 << 10, q_len=1), (fp32, half)),
        Section("b4_q8", batch, (fp32, half)),
        Section("b4_q1", dataclasses.replace(batch, q_len=1), (fp32, half)),
        Section(
            "tiny",
            tiny,
            (Subject(TINY_ATTENTION), Subject(TINY_APPEND, kind=APPEND)),
            rated=False,
        ),
    )
    return {section.name: section for section in sections}
