#!/usr/bin/env python3
"""Compares `dropkv score` with kvpress on fresh random models. Not part of `make test`: needs torch, transformers and
kvpress (about 6 GB; `make test-peers` installs them beside the tests).

    kvpress_live.py build/release/dropkv [--seed S] [--cases N]

Per case a small Llama or Qwen2 with random weights reads random tokens. Scores must agree within 1e-5 of the largest
one; kept tokens may differ only where their scores are tied within the same band.
"""
import argparse
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import kvpress
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

BAND = 1e-5
VOCABULARY = 1999
HUGE = 1e30  # beside the largest float32, which marks what CriticalKV takes in its first stage
RATIOS = (0.3, 0.5, 0.75, 0.9, 0.95)


def random_shape(rng):
    """Head sizes are multiples of 8: `dropkv score` pads others, and LagKV refuses them."""
    kv_heads = rng.choice((1, 2, 3, 4))
    group = rng.choice((1, 2, 3, 4, 7, 8))
    return {"hkv": kv_heads, "hq": kv_heads * group, "d": rng.choice((16, 32, 64, 80, 128)),
            "n": rng.choice((70, 131, 259, 260, 300, 512, 777, 1025)), "layers": 2,
            "theta": rng.choice((10000.0, 500000.0, 1000000.0)), "qwen": rng.random() < 0.5}


def random_model(shape, seed):
    torch.manual_seed(seed)
    config_class, model_class = (Qwen2Config, Qwen2ForCausalLM) if shape["qwen"] else (LlamaConfig, LlamaForCausalLM)
    config = config_class(
        hidden_size=shape["hq"] * shape["d"], intermediate_size=64, num_hidden_layers=shape["layers"],
        num_attention_heads=shape["hq"], num_key_value_heads=shape["hkv"], head_dim=shape["d"], vocab_size=VOCABULARY,
        max_position_embeddings=4096, rope_parameters={"rope_type": "default", "rope_theta": shape["theta"]},
        initializer_range=0.08, attn_implementation="eager")
    model = model_class(config).eval()
    for layer in model.model.layers:  # a spread of logits, so that scores differ
        layer.self_attn.q_proj.weight.data *= 1.5
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as kvpress's own context manager does
    return model


def capture(model, shape):
    """What every press reads of every layer, taken by a hook of the attention modules."""
    seen = []

    def hook(module, _, kwargs, output):
        cache = kwargs["past_key_values"].layers[module.layer_idx]
        seen.append((module, kwargs["hidden_states"], cache.keys, cache.values, output[1], kwargs))

    handles = [layer.self_attn.register_forward_hook(hook, with_kwargs=True) for layer in model.model.layers]
    # No token twice: in the first layer its keys would have one norm, and every choice between them be arbitrary.
    tokens = torch.randperm(VOCABULARY)[None, :shape["n"]]
    with torch.no_grad():
        model.model(tokens, use_cache=True)
    for handle in handles:
        handle.remove()
    return seen


def write_case(path, shape, call):
    module, hidden, keys, values, _, kwargs = call
    heads = lambda x: x.view(1, shape["n"], -1, shape["d"]).transpose(1, 2)
    with torch.no_grad():
        q_pre, k_pre = heads(module.q_proj(hidden)), heads(module.k_proj(hidden))
        q, _ = apply_rotary_pos_emb(q_pre, k_pre, *kwargs["position_embeddings"])
    tensors = {"q": q, "q_pre": q_pre, "k": keys, "k_pre": k_pre, "v": values}
    tensors = {name: tensor[0].contiguous().clone() for name, tensor in tensors.items()}
    tensors["wo"] = module.o_proj.weight.detach().clone()
    save_file(tensors, path, {"scale": repr(module.scaling), "rope_theta": repr(shape["theta"]),
                              "layer": str(module.layer_idx), "layers": str(shape["layers"])})


def presses(rng, n):
    """Pairs of a name and a function from a ratio to the press."""
    window, kernel = rng.choice((4, 8, 16, 32, 64)), rng.choice((1, 3, 5, 7, 11))
    lag, block = rng.choice((8, 16, 32)), rng.choice((16, 64, 128))
    snap = lambda r: kvpress.SnapKVPress(r, window, kernel)
    knorm = lambda r: kvpress.KnormPress(r)
    novnorm = lambda r: kvpress.ExpectedAttentionPress(r, use_vnorm=False)
    name = f"snapkv.w{window}.k{kernel}"

    def finch(r):
        press = kvpress.FinchPress(r)
        press.window_size, press.rerotate_keys = window, False
        return press

    alpha = rng.choice((0.0, 0.2, 0.5))
    plain = [
        (name, snap), ("knorm", knorm), ("keydiff", lambda r: kvpress.KeyDiffPress(r)),
        ("tova", lambda r: kvpress.TOVAPress(r)), (f"finch.w{window}", finch),
        (f"lagkv.lag{lag}", lambda r: kvpress.LagKVPress(r, 4, lag)),
        (f"lagkv.lag{lag}.cross", lambda r: kvpress.LagKVPress(r, 4, lag, True)),
        ("expected", lambda r: kvpress.ExpectedAttentionPress(r)),
        ("expected.nocov", lambda r: kvpress.ExpectedAttentionPress(r, use_covariance=False)),
        ("expected.novnorm", novnorm),
        ("cap", lambda r: kvpress.CapPress(r)), ("cur", lambda r: kvpress.CURPress(r)),
        ("cur.key", lambda r: kvpress.CURPress(r, leverage_type="key")),
        ("cur.value", lambda r: kvpress.CURPress(r, leverage_type="value")),
        ("cur.kv_avg", lambda r: kvpress.CURPress(r, leverage_type="kv_avg")),
        ("cur.global", lambda r: kvpress.CURPress(r, use_local_approximation=False)),
        ("observed", lambda r: kvpress.ObservedAttentionPress(r)),
        ("streaming.sink4", lambda r: kvpress.StreamingLLMPress(r, 4)),
        (f"critical.{name}", lambda r: kvpress.CriticalKVPress(snap(r))),
        ("chunkkv.20." + name, lambda r: kvpress.ChunkKVPress(snap(r), 20)),
        (f"pyramid.w{window}.k{kernel}", lambda r: kvpress.PyramidKVPress(r, window, kernel)),
        (f"keydiff.block{block}", lambda r: kvpress.BlockPress(kvpress.KeyDiffPress(r), block)),
        ("critical.expected.novnorm", lambda r: kvpress.CriticalKVPress(novnorm(r))),
        ("chunkkv.10.knorm", lambda r: kvpress.ChunkKVPress(knorm(r), 10)),
    ]
    shared = [(f"ada{alpha}.{base}", lambda r, make=make: kvpress.AdaKVPress(make(r), alpha))
              for base, make in ((name, snap), ("knorm", knorm), ("expected.novnorm", novnorm))]
    shared += [(f"criticalada{alpha}.{base}", lambda r, make=make: kvpress.CriticalAdaKVPress(make(r), alpha))
               for base, make in ((name, snap), ("knorm", knorm))]
    return [p for p in plain + shared if n > window], window


def reference(make, ratio, call):
    """(scores [Hkv, n] or None, mask [Hkv, n] of what is kept)."""
    module, hidden, keys, values, attentions, kwargs = call
    press = make(ratio)
    scores = None
    if isinstance(press, (kvpress.ScorerPress, kvpress.FinchPress)):
        with torch.no_grad():
            wants = isinstance(press, kvpress.ObservedAttentionPress)
            scores = press.score(module, hidden, keys, values, attentions if wants else None, kwargs)[0].double()
    if isinstance(press, kvpress.BlockPress):  # a tie within float32's rounding would change every later block
        keys, hidden = keys.double(), hidden.double()
    module.masked_key_indices = None
    module.config._attn_implementation = "sdpa"
    with torch.no_grad():
        kept, _ = press.compress(module, hidden, keys, values,
                                 attentions if isinstance(press, kvpress.ObservedAttentionPress) else None, kwargs)
    module.config._attn_implementation = "eager"
    if module.masked_key_indices is not None:
        mask = torch.ones(keys.shape[1:3], dtype=torch.bool)
        _, head, token = module.masked_key_indices
        mask[head, token] = False
        return scores, mask
    same = (keys[0].to(kept.dtype)[:, :, None, :] == kept[0][:, None, :, :]).all(-1)
    return scores, same.any(-1)


def spread_of(values):
    return ((values.max() - values.min()) / values.abs().max().clamp(min=1e-30)).item()


def compare(name, scores, mask, got, base):
    """Empty, or what differs."""
    if scores is not None:
        ours, theirs = got["score"].double(), scores
        first = (ours > HUGE) | (theirs > HUGE)
        scale = theirs[~first].abs().max() if (~first).any() else torch.tensor(1.0)
        errors = ((ours - theirs)[~first].abs() / scale).flatten().sort(descending=True).values
        # LagKV's scores are ranks: two values that are equal up to rounding may swap them, twice a partition at most.
        swapped = 4 if name.startswith("lagkv") and not name.endswith("cross") else 0
        error = errors[swapped].item() if len(errors) > swapped else 0.0
        # What CriticalKV takes first are the largest scores: rounding counts beside those that are left.
        if not error <= (3 * BAND if name.startswith("critical") else BAND):
            return f"scores differ by {error:.1e} of the largest"
    ours = got["kept_mask"].bool()
    differ = ours != mask
    tied = base is not None and differ.any() and spread_of(base[differ]) <= BAND
    # Chunks of different length that are worth the same: which one is taken decides how many tokens are kept.
    if ours.sum() != mask.sum() and not (tied and name.startswith("chunkkv")):
        return f"keeps {int(ours.sum())} tokens, kvpress {int(mask.sum())}"
    if tied or not differ.any():
        return ""
    values = base if base is not None else scores
    if values is None:
        return f"{int(differ.sum())} tokens differ"
    spread = spread_of(values[differ])
    return "" if spread <= BAND else f"{int(differ.sum())} tokens differ, their scores by {spread:.1e} of the largest"


def tie_scores(pairs, name, ratio, call):
    """The scores in which ties of a policy built on another one are found; of chunks their worth."""
    stem = next(name[name.index(base):] for base in ("snapkv", "knorm", "expected") if base in name)
    base, _ = reference(dict(pairs)[stem], ratio, call)
    if name.startswith("chunkkv"):
        size = int(name.split(".")[1])
        worth = torch.cat([part.sum(0).mean().expand(part.shape[1]) for part in base.split(size, dim=1)])
        base = worth.expand_as(base)
    return base


def run_case(program, rng, folder, index, seed):
    shape = random_shape(rng)
    model = random_model(shape, seed * 1000 + index)
    calls = capture(model, shape)
    call = calls[rng.randrange(len(calls))]
    source, target = folder / "in.safetensors", folder / "out.safetensors"
    write_case(source, shape, call)
    checks, failures = 0, []
    pairs, _ = presses(rng, shape["n"])
    for name, make in pairs:
        ratio = rng.choice(RATIOS)
        try:
            scores, mask = reference(make, ratio, call)
        except (RuntimeError, AssertionError, ValueError) as error:
            print(f"  {name}@{ratio}: kvpress refuses: {str(error).splitlines()[0][:90]}")
            continue
        done = subprocess.run([program, "score", source, "--policy", name, "--parity", "--compression-ratio",
                               str(ratio), "--out", target], capture_output=True, text=True, check=False)
        checks += 1
        if done.returncode != 0:
            failures.append(f"{name}@{ratio}: {done.stderr.strip()}")
            continue
        built = name.startswith(("ada", "chunkkv", "critical"))
        base = tie_scores(pairs, name, ratio, call) if built else None
        problem = compare(name, scores, mask, load_file(target), base)
        if problem:
            failures.append(f"{name}@{ratio}: {problem}")
    print(f"case {index}: {json.dumps(shape)} layer {call[0].layer_idx}: {checks} compared, {len(failures)} differ",
          flush=True)
    for failure in failures:
        print("  " + failure)
    return checks, len(failures)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", type=pathlib.Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--cases", type=int, default=8)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    checks = differ = 0
    with tempfile.TemporaryDirectory() as folder:
        for index in range(options.cases):
            a, b = run_case(options.program.resolve(), rng, pathlib.Path(folder), index, options.seed)
            checks, differ = checks + a, differ + b
    print(f"{checks} comparisons, {differ} differ")
    return 1 if differ or not checks else 0


if __name__ == "__main__":
    sys.exit(main())
