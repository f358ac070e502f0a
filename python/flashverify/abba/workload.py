"""The tensors that both arms, the references and the peers share."""

import dataclasses
import hashlib

import torch

from flashverify.abba.cache_file import KV_DTYPES, CacheFile
from flashverify.abba.case import CHUNK_TOKENS, Case

# Standard normal keys and values reach about 5.5; these dequantisation scales spread them
# over E4M3's range. No powers of two, so that a scale applied twice or rounded shows.
SYNTHETIC_K_SCALE = 0.0137
SYNTHETIC_V_SCALE = 0.0171

_E4M3_MAX = 448.0


@dataclasses.dataclass(frozen=True)
class Workload:
    """One call's inputs.

    ``q`` [rows, q_heads, head_dim] float16; caches [pages, page_size, kv_heads, head_dim];
    ``page_table`` int32 [batch, pages per request], a random permutation of all pages;
    ``seq_lens`` int32 [batch]; scales float32 [1] or [kv_heads].
    """

    case: Case
    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    seq_lens: torch.Tensor
    k_dequant_scale: torch.Tensor
    v_dequant_scale: torch.Tensor
    softmax_scale: float
    source: str

    def on(self, device: str) -> "Workload":
        """The same workload with its tensors on a device."""
        tensors = {
            field.name: value.to(device)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), torch.Tensor)
        }
        return dataclasses.replace(self, **tensors)  # type: ignore[arg-type]

    def slots(self, request: int, start: int, stop: int) -> torch.Tensor:
        """Cache slots of the tokens ``start`` .. ``stop`` - 1 of a request, int64."""
        tokens = torch.arange(start, stop, device=self.page_table.device)
        pages = self.page_table[request, tokens // self.case.page_size].to(torch.int64)
        return pages * self.case.page_size + tokens % self.case.page_size

    def read(
        self, cache: torch.Tensor, request: int, start: int, stop: int, head: int
    ) -> torch.Tensor:
        """Keys or values of one head, float32 [stop - start, head_dim], not yet scaled."""
        # Only integers can be gathered: the eight-bit floats have no index_select.
        flat = as_integers(cache).view(-1, self.case.kv_heads, self.case.head_dim)
        gathered = flat[self.slots(request, start, stop), head]
        return gathered.view(cache.dtype).to(torch.float32)

    def sha256(self) -> dict[str, str]:
        """Digest of each input's bytes."""
        names = ("q", "k_cache", "v_cache", "page_table", "k_dequant_scale", "v_dequant_scale")
        return {name: tensor_sha256(getattr(self, name)) for name in names}


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """The same bytes as uint8 or int16."""
    return tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.int16)


def tensor_sha256(tensor: torch.Tensor) -> str:
    """SHA-256 of the tensor's bytes in row-major order."""
    # Through uint8, since NumPy knows neither BF16 nor the eight-bit floats.
    data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.sha256(data.numpy().data).hexdigest()


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Whether two tensors hold the same bytes; unlike ==, also where they hold NaN."""
    return torch.equal(as_integers(left), as_integers(right))


def make(case: Case, seed: int, cache_file: CacheFile | None) -> Workload:
    """The workload of a cache file, or of standard normal data.

    Slots past each request's last token hold NaN: an arm that reads them shows it.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = case.batch * case.pages_per_request
    shape = (pages, case.page_size, case.kv_heads, case.head_dim)
    dtype = KV_DTYPES[case.kv_dtype]
    page_table = torch.randperm(pages, generator=generator).to(torch.int32)
    if cache_file is not None:
        q = cache_file.q
        k_scale, v_scale = cache_file.k_dequant_scale, cache_file.v_dequant_scale
        softmax_scale = cache_file.softmax_scale
        source = f"cache file, sha256 {cache_file.sha256}"
    else:
        q = torch.randn(case.rows, case.q_heads, case.head_dim, generator=generator)
        eight_bits = dtype.itemsize == 1
        k_scale = torch.tensor([SYNTHETIC_K_SCALE if eight_bits else 1.0])
        v_scale = torch.tensor([SYNTHETIC_V_SCALE if eight_bits else 1.0])
        softmax_scale = case.softmax_scale
        source = f"standard normal, seed {seed}"
    workload = Workload(
        case=case,
        q=q.to(torch.float16).contiguous(),
        k_cache=torch.empty(shape, dtype=dtype),
        v_cache=torch.empty(shape, dtype=dtype),
        page_table=page_table.view(case.batch, case.pages_per_request),
        seq_lens=torch.full((case.batch,), case.context, dtype=torch.int32),
        k_dequant_scale=k_scale,
        v_dequant_scale=v_scale,
        # The library takes an FP32 number; the references then use the same one.
        softmax_scale=float(torch.tensor(softmax_scale, dtype=torch.float32)),
        source=source,
    )
    for cache, scale in ((workload.k_cache, k_scale), (workload.v_cache, v_scale)):
        cache.fill_(float("nan"))
        flat = as_integers(cache).view(-1, case.kv_heads, case.head_dim)
        for request in range(case.batch):
            for start in range(0, case.context, CHUNK_TOKENS):
                stop = min(start + CHUNK_TOKENS, case.context)
                if cache_file is not None:
                    stored = cache_file.k if cache is workload.k_cache else cache_file.v
                    codes = stored[start:stop]
                else:
                    normal = torch.randn(
                        stop - start, case.kv_heads, case.head_dim, generator=generator
                    )
                    codes = (normal / scale).clamp_(-_E4M3_MAX, _E4M3_MAX).to(dtype)
                flat[workload.slots(request, start, stop)] = as_integers(codes)
    return workload
