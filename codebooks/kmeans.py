"""Residual k-means: codebooks from a sample of items, level by level, and with them the codes of any vectors.

Each level has the code argmin_j |r - c_j|^2 + p_j of what the levels before left of a vector, r, and leaves r - c_j.
Without prices p it is residual quantization (Chen, Guan, Wang, 2010). Balanced codes have those of optimal transport
with equal masses, found by Sinkhorn's iteration (Cuturi, 2013) with falling temperature, in turns with new means.

Cost: 4 * iterations * points * codes * d FLOPs per level; memory: the sample and a few 100 MB for any number of items,
and up to 128 codes^2 bytes for balanced ones.
Matrix products instead of scattered sums make it repeatable, also on a GPU.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import one_hot

from evenrank.core.optional_imports import naming_extras

POINTS_PER_CODE = 256  # of the sample, as in faiss
_ITERATIONS = 25  # likewise
_VALUES_AT_ONCE = 1 << 24
_MOST_WITHOUT_FAISS = 10**10  # points * d * codes: half a minute per level on one core
# Of balancing; temperatures are relative to the mean squared distance.
_ROUNDS, _STEPS, _TEMPERATURES, _MAX_SCORES = 8, 10, (0.3, 0.1, 0.03, 0.01), 1 << 23

OnStage = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of vectors that may be mapped from a file: float32 when they are read."""

    vectors: NDArray[Any]
    items: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, place: Any) -> NDArray[np.float32]:
        found: NDArray[np.float32] = self.vectors[self.items[place]].astype(np.float32)
        return found


def parts(count: int, columns: int, on_stage: OnStage, what: str) -> Iterator[slice]:
    """Yield slices of so many rows, which together have few enough values, and say how far it is."""
    rows = _rows(columns)
    for begin in range(0, count, rows):
        on_stage(f"{what}: {begin:,} of {count:,}")
        yield slice(begin, begin + rows)


class Codebooks(NamedTuple):
    """What makes codes of vectors."""

    centroids: NDArray[np.float32]
    """[levels, codes, d]."""
    prices: NDArray[np.float32]
    """[levels, codes], in the unit of squared distances."""


def train_codebooks(
    sample: NDArray[np.float32], *, levels: int, codes: int, is_balanced: bool, seed: int, on_stage: OnStage
) -> Codebooks:
    """Return the codebooks of a sample [n, d], which is overwritten; n >= codes.

    Raises:
        MissingPackageError: faiss is not installed, there is no GPU, and the sample is large.
    """
    residuals, books = torch.from_numpy(sample).to(_device()), []
    for level in range(levels):
        on_stage(f"level {level + 1} of {levels}: k-means of {len(sample):,} items")
        centroids = _kmeans(residuals, codes, seed % (1 << 30) + level)
        prices = torch.zeros(codes, device=residuals.device)
        if is_balanced:
            on_stage(f"level {level + 1} of {levels}: balancing {codes:,} codes")
            centroids, prices = _balance(residuals, centroids, prices)
        for chunk in residuals.split(_rows(codes)):
            chunk -= centroids[_scores(chunk, centroids, prices).argmin(dim=1)]
        books.append((centroids.cpu().numpy(), prices.cpu().numpy()))
    return Codebooks(*map(np.stack, zip(*books, strict=True)))


def encode(vectors: Rows, books: Codebooks, on_stage: OnStage) -> NDArray[np.int32]:
    """Return the codes [n, levels] of vectors [n, d]."""
    centroids, prices = (torch.from_numpy(part).to(_device()) for part in books)
    codes = np.empty((len(vectors), len(centroids)), dtype=np.int32)
    for part in parts(len(vectors), max(centroids.shape[1:]), on_stage, "codes of items"):
        residuals = torch.from_numpy(vectors[part]).to(centroids.device)
        for level, of_level in enumerate(centroids):
            nearest = _scores(residuals, of_level, prices[level]).argmin(dim=1)
            residuals -= of_level[nearest]
            codes[part, level] = nearest.cpu().numpy()
    return codes


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _rows(columns: int) -> int:
    return max(1, _VALUES_AT_ONCE // columns)


def _scores(points: Tensor, centroids: Tensor, prices: Tensor) -> Tensor:
    """Return squared distances plus prices, less each point's squared norm: [n, codes]."""
    return torch.addmm(centroids.square().sum(dim=1) + prices, points, centroids.T, alpha=-2)


def _kmeans(points: Tensor, codes: int, seed: int) -> Tensor:
    """Return centroids [codes, d]: of faiss on a CPU, of PyTorch on a GPU or where faiss is missing."""
    if not points.is_cuda:
        try:
            import faiss
        except ModuleNotFoundError:
            if points.numel() * codes > _MOST_WITHOUT_FAISS:
                with naming_extras():
                    raise
        else:
            sizes = {"min_points_per_centroid": 1, "max_points_per_centroid": POINTS_PER_CODE}
            trained = faiss.Kmeans(points.shape[1], codes, niter=_ITERATIONS, seed=seed, **sizes)
            trained.train(points.numpy())
            return torch.from_numpy(trained.centroids)
    random = torch.Generator().manual_seed(seed)
    centroids = points[torch.randperm(len(points), generator=random)[:codes].to(points.device)]
    no_prices = torch.zeros(codes, device=points.device)
    for _ in range(_ITERATIONS):
        centroids, counts, distances = _means(points, centroids, no_prices)
        if num_dead := int((dead := counts == 0).sum()):  # go to the worst points
            centroids[dead] = points[distances.topk(num_dead).indices]
    return centroids


def _means(points: Tensor, centroids: Tensor, prices: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return each code's mean [codes, d] and number of its points [codes], and each point's score, from its norm up."""
    sums, counts, scores = torch.zeros_like(centroids), torch.zeros_like(prices), []
    for chunk in points.split(_rows(len(centroids))):
        best, codes = _scores(chunk, centroids, prices).min(dim=1)
        is_own = one_hot(codes, len(centroids)).to(chunk.dtype)
        sums.addmm_(is_own.T, chunk)
        counts += is_own.sum(dim=0)
        scores.append(best + chunk.square().sum(dim=1))
    means = torch.where(counts[:, None] > 0, sums / counts.clamp(min=1)[:, None], centroids)
    return means, counts, torch.cat(scores)


def _balance(points: Tensor, centroids: Tensor, prices: Tensor) -> tuple[Tensor, Tensor]:
    """Return centroids and prices with which codes have about equally many of the points."""
    codes = len(centroids)
    # At least 16 points per code, evenly over the ids, which are in the order of first events.
    points = points[:: max(1, len(points) // max(_MAX_SCORES // codes, 16 * codes))]
    scale = _means(points, centroids, prices)[2].mean().clamp(min=1e-30)
    for is_last in [False] * (_ROUNDS - 1) + [True]:
        distances = [_scores(chunk, centroids, torch.zeros_like(prices)) for chunk in points.split(_rows(codes))]
        for temperature in _TEMPERATURES:
            for _ in range(_STEPS):
                shares = torch.zeros_like(prices)
                for chunk in distances:
                    shares += ((chunk + prices) / (-temperature * scale)).softmax(dim=1).sum(dim=0)
                prices = prices + temperature * scale * (shares / len(points) * codes).clamp(min=1e-9).log()
        if not is_last:
            centroids = _means(points, centroids, prices)[0]
    return centroids, prices
