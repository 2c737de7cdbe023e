"""Hugging Face models with random weights on Tessera, against eager attention and SDPA."""

import pytest
import torch

transformers = pytest.importorskip("transformers", minversion="5.5")

import tessera  # noqa: E402
import tessera.transformers  # noqa: E402

tessera.transformers.register()

SMALL = dict(vocab_size=101, hidden_size=64, intermediate_size=96, num_hidden_layers=2, max_position_embeddings=256)
MODELS = {
    "llama": lambda: transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**SMALL, num_attention_heads=8, num_key_value_heads=2)
    ),
    "phi": lambda: transformers.PhiForCausalLM(
        transformers.PhiConfig(**SMALL | dict(hidden_size=160), num_attention_heads=2, partial_rotary_factor=0.4)
    ),
    "qwen2": lambda: transformers.Qwen2ForCausalLM(
        transformers.Qwen2Config(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, use_sliding_window=True, sliding_window=8,
            max_window_layers=1,
        )
    ),  # fmt: skip
    "gemma2": lambda: transformers.Gemma2ForCausalLM(
        transformers.Gemma2Config(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=32, sliding_window=8,
            attn_logit_softcapping=5.0, query_pre_attn_scalar=11,
        )
    ),  # fmt: skip
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=101, n_embd=64, n_layer=2, n_head=4, n_positions=256, attn_pdrop=0.0, embd_pdrop=0.0,
            resid_pdrop=0.0,
        )
    ),  # fmt: skip
    "gpt_oss": lambda: transformers.GptOssForCausalLM(
        transformers.GptOssConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_local_experts=2,
            num_experts_per_tok=1, sliding_window=8, layer_types=["sliding_attention", "full_attention"],
        )
    ),  # fmt: skip
}


@pytest.fixture(params=MODELS)
def model(request):
    torch.manual_seed(1)
    made = MODELS[request.param]().eval()
    with torch.no_grad():
        for name, parameter in made.named_parameters():
            if "sinks" in name:
                parameter.normal_()
            elif parameter.dim() > 1:
                parameter.mul_(4)  # so that attention matters and no two tokens tie
    made.generation_config.pad_token_id = 0
    made.generation_config.eos_token_id = None
    return made


def tokens(batch=3, length=21):
    return torch.randint(1, 101, (batch, length))


def padding(batch=3, length=21, side="left"):
    mask = torch.ones(batch, length, dtype=torch.long)
    for row, missing in enumerate((0, 5, 13)[:batch]):
        if missing:
            mask[row, slice(0, missing) if side == "left" else slice(-missing, None)] = 0
    return mask


def logits_and_gradients(model, implementation, ids, mask, **rest):
    model.set_attn_implementation(implementation)
    model.zero_grad()
    logits = model(ids, attention_mask=mask, use_cache=False, **rest).logits
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    logits[real].square().mean().backward()
    grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return logits.detach()[real], grads


def assert_same(got, want, tolerance=2e-4):
    for a, b in zip((got[0], *got[1].values()), (want[0], *want[1].values())):
        assert (a - b).abs().max() <= tolerance * max(1.0, b.abs().max().item())
    assert got[1].keys() == want[1].keys()


def make(name, kind="ForCausalLM", **options):
    sizes = SMALL | dict(num_attention_heads=4, initializer_range=0.3, pad_token_id=0) | options
    config = getattr(transformers, name + "Config")(**sizes)
    return getattr(transformers, name + kind)(config)


# Models that say what is seen in the mask alone, or in the mask and elsewhere in other words.
MASKS = {
    "a window that layers do not pass on": lambda: make(
        "Qwen2Moe", num_key_value_heads=2, use_sliding_window=True, sliding_window=8, max_window_layers=2, num_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=32, shared_expert_intermediate_size=32,
    ),
    "a window on both sides": lambda: make("ModernBert", "ForMaskedLM", local_attention=8, global_attn_every_n_layers=2),
    "a causal model whose layers do not say so": lambda: make(
        "BigBirdPegasus", d_model=64, decoder_layers=2, decoder_ffn_dim=96, decoder_attention_heads=4, init_std=0.3
    ),
    "a model that sees everything, whose layers do not say so": lambda: make("Splinter", "Model"),
}  # fmt: skip


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("what", MASKS)
def test_what_the_mask_says_counts(what, padded):
    torch.manual_seed(1)
    model, ids = MASKS[what]().eval(), tokens(length=24)
    mask = padding(length=24, side="right") if padded else torch.ones_like(ids)
    results = {}
    with torch.no_grad():
        for implementation in ("eager", "tessera"):
            model.set_attn_implementation(implementation)
            results[implementation] = model(ids, attention_mask=mask)[0][mask.bool()]
    difference = (results["tessera"] - results["eager"]).abs().max()
    assert difference <= 2e-4 * results["eager"].abs().max()


def test_a_window_that_layers_do_not_pass_on_is_refused_in_a_compiled_model():
    model = MASKS["a window that layers do not pass on"]().eval()
    model.set_attn_implementation("tessera")
    with torch.no_grad(), pytest.raises(Exception, match="does not pass its sliding window"):
        torch.compile(model.model, backend="eager")(tokens(length=24))


@pytest.mark.parametrize("name", ["block_indices", "indices"])
def test_arguments_that_choose_keys_are_refused(name):
    q = torch.randn(1, 2, 8, 16)
    with pytest.raises(tessera.Error, match=f"{name} is given"):
        tessera.transformers.forward(torch.nn.Module(), q, q, q, None, **{name: torch.zeros(1, 2, 8, 4)})


@pytest.mark.parametrize("side", [None, "left", "right"])
def test_logits_and_gradients_match_eager(model, side):
    ids = tokens()
    mask = padding(side=side) if side else None
    got = logits_and_gradients(model, "tessera", ids, mask)
    assert_same(got, logits_and_gradients(model, "eager", ids, mask))


def reference_of(model):
    """SDPA if the model supports it; Gemma 2's softcap and GPT-OSS's sinks need eager."""
    return "sdpa" if model.config.model_type not in ("gemma2", "gpt_oss") else "eager"


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padded", [False, True])
def test_generated_tokens_equal_sdpas(model, cache, padded):
    ids = tokens()
    mask = padding() if padded else torch.ones_like(ids)
    results = []
    for implementation in ("tessera", reference_of(model)):
        model.set_attn_implementation(implementation)
        results.append(
            model.generate(
                ids, attention_mask=mask, max_new_tokens=16, do_sample=False, cache_implementation=cache,
                output_logits=True, return_dict_in_generate=True,
            )
        )  # fmt: skip
    got, want = results
    assert torch.equal(got.sequences, want.sequences)
    # Tokens may repeat; the logits do not.
    for a, b in zip(got.logits, want.logits):
        assert (a - b).abs().max() < 1e-4 * max(1.0, b.abs().max().item())


def test_a_cache_is_continued_in_pieces(model):
    """Several new tokens against a cache that already holds some."""
    ids = tokens(batch=1, length=24)
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = model(ids).logits[:, 14:]
        model.set_attn_implementation("tessera")
        cache = transformers.DynamicCache(config=model.config)
        model(ids[:, :14], past_key_values=cache)
        pieces = [model(ids[:, a:b], past_key_values=cache).logits for a, b in ((14, 15), (15, 20), (20, 24))]
    assert (torch.cat(pieces, dim=1) - want).abs().max() < 1e-4 * max(1.0, want.abs().max().item())


def packed_example():
    lengths = (5, 11, 1, 7)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return ids, positions, lengths


@pytest.mark.parametrize("name", ["llama", "phi", "gemma2"])
@pytest.mark.parametrize("explicit", [False, True])
def test_packed_sequences_do_not_see_each_other(name, explicit):
    model = MODELS[name]().eval()
    ids, positions, lengths = packed_example()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
        model.set_attn_implementation("tessera")
        rest = {}
        if explicit:
            cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
            rest = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=11, max_length_k=11)
        got = model(ids, position_ids=positions, use_cache=False, **rest).logits
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name", ["llama", "gemma2"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_model_compiles_into_one_graph(name, padded):
    torch.compiler.reset()
    model = MODELS[name]()
    model.set_attn_implementation("tessera")
    ids, mask = tokens(), padding() if padded else None
    want = logits_and_gradients(model, "tessera", ids, mask)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    model.zero_grad()
    logits = compiled(ids, attention_mask=mask, use_cache=False).logits
    real = torch.ones_like(ids).bool() if mask is None else mask.bool()
    logits[real].square().mean().backward()
    grads = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    assert_same((logits.detach()[real], grads), want)


def test_a_compiled_model_refuses_packing_by_position_ids_alone():
    torch.compiler.reset()
    model = MODELS["llama"]()
    model.set_attn_implementation("tessera")
    ids, positions, lengths = packed_example()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with pytest.raises(RuntimeError, match="cu_seq_lens_q"), torch.no_grad():
        compiled(ids, position_ids=positions, use_cache=False)
    cu = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    packing = dict(cu_seq_lens_q=cu, cu_seq_lens_k=cu, max_length_q=11, max_length_k=11)
    with torch.no_grad():
        got = compiled(ids, position_ids=positions, use_cache=False, **packing).logits
        assert (got - model(ids, position_ids=positions, use_cache=False).logits).abs().max() < 1e-5


def test_a_static_cache_decodes_in_a_compiled_model():
    torch.compiler.reset()
    model = MODELS["llama"]().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    results = []
    for compiled in (False, True):
        model.set_attn_implementation("tessera")
        cache = transformers.StaticCache(config=model.config, max_cache_len=40)
        step = torch.compile(model, fullgraph=True, backend="aot_eager") if compiled else model
        torch.manual_seed(3)
        ids = tokens(2, 9)
        out = []
        with torch.no_grad():
            logits = model(ids, past_key_values=cache).logits
            for _ in range(4):
                ids = logits[:, -1:].argmax(-1)
                logits = step(ids, past_key_values=cache).logits
                out.append(logits)
        results.append(torch.cat(out))
    assert (results[0] - results[1]).abs().max() < 1e-5


@pytest.fixture
def decoded(monkeypatch):
    """Which shapes decode is called with, and whether lengths are given."""
    calls = []
    real = tessera.transformers.decode

    def counting(q, k, v, **rest):
        calls.append((q.shape[1], k.shape[1], "cache_seqlens" in rest))
        return real(q, k, v, **rest)

    monkeypatch.setattr(tessera.transformers, "decode", counting)
    return calls


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", [None, "left"])
def test_generation_decodes(decoded, cache, side):
    model = MODELS["llama"]().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    model.set_attn_implementation("tessera")
    ids = tokens()
    mask = padding(side=side) if side else torch.ones_like(ids)
    model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, cache_implementation=cache)
    layers, steps = 2, 4  # the first token comes from the prefill
    keys = [ids.shape[1] + 1 + i for i in range(steps)] if cache == "dynamic" else [25] * steps
    lengths = side is not None or cache == "static"
    assert decoded == [(1, n, lengths) for n in keys for _ in range(layers)]


@pytest.mark.parametrize("static", [False, True])
def test_decode_knows_how_many_tokens_of_padding_are_on_the_left(static):
    used = torch.tensor(5) if static else 5
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1], [0, 0, 0, 0, 0], [0, 0, 0, 0, 1]]).bool()
    made = tessera.transformers._decode_mask(4, used, mask, mask.device)
    assert made.dtype == torch.int32 and made.tolist() == [[[[5, 5, 5, 5]], [[2, 0, 5, 4]]]]
    assert tessera.transformers._decode_mask(4, used + 1, mask, mask.device) is None
    for elsewhere in ([0, 1, 0, 1, 1], [1, 1, 1, 1, 0]):
        mask[1] = torch.tensor(elsewhere)
        assert tessera.transformers._decode_mask(4, used, mask, mask.device) is None


@pytest.mark.parametrize("name", ["llama", "phi", "gpt_oss"])
def test_padding_between_tokens_is_not_decoded(decoded, name):
    """As in a continued conversation. Without the padding, a window would reach further back, so that is refused."""
    torch.manual_seed(4)
    model = MODELS[name]().eval()
    ids = tokens(2, 24)
    mask = torch.ones_like(ids)
    mask[0, 18:20] = 0  # within the windows of sliding layers, too
    results = []
    for implementation in ("eager", "tessera"):
        model.set_attn_implementation(implementation)
        cache = transformers.DynamicCache(config=model.config)
        with torch.no_grad():
            model(ids[:, :18], attention_mask=mask[:, :18], past_key_values=cache)
            if name == "gpt_oss" and implementation == "tessera":
                with pytest.raises(tessera.Error, match="sliding window"):
                    model(ids[:, 18:], attention_mask=mask, past_key_values=cache)
                return
            model(ids[:, 18:23], attention_mask=mask[:, :23], past_key_values=cache)
            results.append(model(ids[:, 23:], attention_mask=mask, past_key_values=cache).logits)
    assert decoded == [] and (results[0] - results[1]).abs().max() < 1e-4 * max(1.0, results[0].abs().max().item())


def test_short_passes_with_gradients_are_not_decoded(decoded):
    model = MODELS["llama"]()
    ids = tokens(2, 12)
    assert_same(logits_and_gradients(model, "tessera", ids, None), logits_and_gradients(model, "eager", ids, None))
    mask = padding(2, 12, side="left")
    assert_same(logits_and_gradients(model, "tessera", ids, mask), logits_and_gradients(model, "eager", ids, mask))
    assert decoded == []


def test_short_packed_sequences_do_not_see_each_other():
    model = MODELS["llama"]().eval()
    lengths = (2, 5, 1)
    ids = tokens(1, sum(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    model.set_attn_implementation("eager")
    with torch.no_grad():
        want = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], dim=1)
        model.set_attn_implementation("tessera")
        got = model(ids, position_ids=positions, use_cache=False).logits
    assert (got - want).abs().max() < 1e-4


@pytest.mark.parametrize("name, graphs", [("llama", 1), ("phi", 1), ("qwen2", 2)])
@pytest.mark.parametrize("padded", [False, True])
def test_generate_compiles_a_static_cache_once(name, graphs, padded):
    """A sliding layer counts its keys in Python, which costs every attention implementation one more graph."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    torch.manual_seed(1)
    model = MODELS[name]().eval()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    model.set_attn_implementation("tessera")
    ids = tokens()
    mask = padding() if padded else torch.ones_like(ids)
    compiling = transformers.CompileConfig(backend="aot_eager", mode=None, fullgraph=True)
    compiling._compile_all_devices = True
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, cache_implementation="static")
    got = model.generate(ids, **options, compile_config=compiling)
    assert counters["stats"]["unique_graphs"] == graphs
    assert torch.equal(got, model.generate(ids, **options, disable_compile=True))


@pytest.mark.parametrize("name", ["llama", "phi"])
def test_gradient_checkpointing_changes_nothing(name):
    model = MODELS[name]().train()
    ids, mask = tokens(), padding(side="right")
    want = logits_and_gradients(model, "tessera", ids, mask)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    assert_same(logits_and_gradients(model, "tessera", ids, mask), want, 1e-6)


def test_four_bit_weights_are_left_as_they_are():
    bnb = pytest.importorskip("bitsandbytes")
    torch.manual_seed(3)
    model = MODELS["llama"]().eval()
    for module in [m for m in model.model.layers.modules() if not isinstance(m, torch.nn.Linear)]:
        for name, child in list(module.named_children()):
            if isinstance(child, torch.nn.Linear):
                quantised = bnb.nn.Linear4bit(child.in_features, child.out_features, child.bias is not None)
                quantised.load_state_dict(child.state_dict())
                setattr(module, name, quantised.to("cpu"))
    layers = [m for m in model.modules() if isinstance(m, bnb.nn.Linear4bit)]
    assert len(layers) == 2 * 7
    packed = [layer.weight.data.clone() for layer in layers]
    assert all(weight.dtype == torch.uint8 for weight in packed)
    ids = tokens()
    logits = {}
    with torch.no_grad():
        for implementation in ("eager", "tessera"):
            model.set_attn_implementation(implementation)
            logits[implementation] = model(ids).logits
    assert_same((logits["tessera"], {}), (logits["eager"], {}))
    assert all(torch.equal(layer.weight.data, weight) for layer, weight in zip(layers, packed))


def test_an_encoder_with_padding():
    config = transformers.BertConfig(
        vocab_size=101, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, intermediate_size=96,
        attention_probs_dropout_prob=0.0, hidden_dropout_prob=0.0,
    )  # fmt: skip
    model = transformers.BertModel(config).eval()
    ids, mask = tokens(), padding(side="right")
    outputs = []
    for implementation in ("eager", "tessera"):
        model.set_attn_implementation(implementation)
        with torch.no_grad():
            outputs.append(model(ids, attention_mask=mask).last_hidden_state[mask.bool()])
    assert (outputs[0] - outputs[1]).abs().max() < 1e-5


def test_from_config_accepts_the_implementation():
    config = transformers.LlamaConfig(**SMALL, num_attention_heads=8, num_key_value_heads=2)
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="tessera")
    assert model.config._attn_implementation == "tessera"
    assert tessera.transformers.report(model) == 2


def test_report_says_what_each_layer_runs_on(capsys):
    model = MODELS["llama"]()
    model.set_attn_implementation("tessera")
    assert tessera.transformers.report(model) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "model.layers.0.self_attn: 8 heads, 2 kv heads, head dim 8, GQA, kernel cpu_attention"
    assert lines[-1] == "2 of 2 attention layers run on tessera"
    model.set_attn_implementation("sdpa")
    assert tessera.transformers.report(model) == 0
    assert "not on tessera (sdpa)" in capsys.readouterr().out
    tessera.transformers.register("by_another_name")
    model.set_attn_implementation("by_another_name")
    assert tessera.transformers.report(model) == 2


def test_the_mask_says_whether_a_pass_is_causal():
    """Some models pass is_causal=False whenever there is a mask."""
    q, k, v = (torch.randn(2, 4, 6, 16) for _ in range(3))
    module = torch.nn.Module()
    mask = tessera.transformers.segments(2, 6, 6, attention_mask=torch.tensor([[1] * 6, [0, 0, 1, 1, 1, 1]]))
    out, _ = tessera.transformers.forward(module, q, k, v, mask, is_causal=False)
    want = tessera.sdpa(q[:1], k[:1], v[:1], is_causal=True).transpose(1, 2)
    assert (out[:1] - want).abs().max() < 1e-6
    want = tessera.sdpa(*(t[1:, :, 2:] for t in (q, k, v)), is_causal=True).transpose(1, 2)
    assert (out[1:, 2:] - want).abs().max() < 1e-6 and (out[1, :2] == 0).all()


def test_unsupported_features_raise():
    dropping = transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=64, n_layer=1, n_head=4, vocab_size=101))
    dropping.set_attn_implementation("tessera")
    with pytest.raises(tessera.Error, match="attn_pdrop"):
        dropping.train()(tokens())
    model = MODELS["llama"]()
    model.set_attn_implementation("tessera")
    dense = torch.zeros(3, 1, 21, 21)
    with pytest.raises(tessera.Error, match="2-D padding mask"):
        model(tokens(), attention_mask=dense)
    from transformers.masking_utils import chunked_causal_mask_function, create_causal_mask

    embeds = torch.zeros(3, 21, 64)
    with pytest.raises(tessera.Error, match="pattern of its own"):
        tessera.transformers.segments(3, 21, 21, mask_function=chunked_causal_mask_function(8, torch.zeros(3)))
    with pytest.raises(tessera.Error, match="pattern of its own"):
        create_causal_mask(
            config=model.config, inputs_embeds=embeds, attention_mask=None, past_key_values=None,
            and_mask_function=lambda b, h, q, k: q > 0,
        )  # fmt: skip


TEXT = """In the beginning was the tile, and the tile was small enough to keep. Rows of scores came and went, and each row
remembered two numbers: the largest score that it had seen and the sum of what it had weighed. When a larger score came,
the sum was scaled, and so was the answer so far. Nobody ever saw the whole matrix, and nobody missed it."""


def trained(kind, steps=50, **rest):
    """A two-layer model trained for some steps on the text's characters; returns it, the losses and the tokens."""
    torch.manual_seed(0)
    letters = sorted(set(TEXT))
    ids = torch.tensor([letters.index(c) for c in TEXT])
    shape = dict(vocab_size=len(letters), hidden_size=160, intermediate_size=320, num_hidden_layers=2)
    shape |= dict(num_attention_heads=2, max_position_embeddings=256, attn_implementation="tessera")
    if kind == "phi":  # head dim 80, partial rotary embedding
        config = transformers.PhiConfig(**shape, partial_rotary_factor=0.4, embd_pdrop=0.0, resid_pdrop=0.0)
        model = transformers.PhiForCausalLM(config).train()
    else:
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape, num_key_value_heads=1)).train()
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 0, None
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(0, len(ids) - 65, (8,))
        batch = torch.stack([ids[s : s + 64] for s in starts])
        loss = model(batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return model.eval(), losses, ids


def test_a_phi_shaped_models_loss_falls():
    _, losses, _ = trained("phi")
    first, last = sum(losses[:5]) / 5, sum(losses[-5:]) / 5
    assert last < 0.6 * first, (first, last)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["llama", "phi"])
@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_generated_tokens_equal_sdpas_on_a_gpu(kind, cache):
    """The model is trained, so that hardly any two tokens are equally likely within bf16's rounding."""
    model, _, ids = trained(kind, steps=150)
    model = model.to("cuda", torch.bfloat16)
    prompts = torch.stack([ids[s : s + 40] for s in (0, 60, 120)]).cuda()
    mask = torch.ones_like(prompts)
    mask[1, :9] = 0
    results = []
    for implementation in ("tessera", "sdpa"):
        model.set_attn_implementation(implementation)
        options = dict(max_new_tokens=24, do_sample=False, cache_implementation=cache, disable_compile=True)
        options |= dict(output_logits=True, return_dict_in_generate=True)
        results.append(model.generate(prompts, attention_mask=mask, **options))
    ours, theirs = (result.sequences[:, 40:] for result in results)
    best = torch.stack(results[1].logits, 1).float().topk(2).values
    for row in range(3):
        different = (ours[row] != theirs[row]).nonzero().flatten().tolist()
        if different:  # what follows is a different text
            first, second = best[row, different[0]].tolist()
            assert first - second <= 2 * torch.finfo(torch.bfloat16).eps * abs(first)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("kind", ["llama", "phi"])
def test_training_on_a_gpu_matches_sdpa(kind):
    model, _, ids = trained(kind, steps=0)
    model = model.to("cuda", torch.bfloat16)
    model.gradient_checkpointing_enable(dict(use_reentrant=False))
    batch = torch.stack([ids[s : s + 200] for s in (0, 50, 90)]).cuda()
    mask = torch.ones_like(batch)
    mask[2, 120:] = 0
    norms = []
    for implementation in ("tessera", "sdpa", "eager"):
        model.set_attn_implementation(implementation)
        model.train().zero_grad()
        labels = batch.masked_fill(mask == 0, -100)
        loss = model(batch, attention_mask=mask, labels=labels, use_cache=False).loss
        loss.backward()
        grads = torch.cat([p.grad.float().flatten() for p in model.parameters()])
        norms.append((loss.item(), grads))
    (ours, our_grads), (theirs, their_grads), (plain, plain_grads) = norms
    assert abs(ours - plain) <= 2 * abs(theirs - plain) + 1e-2
    distance = lambda a, b: ((a - b).norm() / b.norm()).item()  # noqa: E731
    assert distance(our_grads, plain_grads) <= 2 * distance(their_grads, plain_grads) + 1e-2


MIXTURES = {
    "mixtral": lambda: transformers.MixtralForCausalLM(
        transformers.MixtralConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
        )
    ),
    "qwen2_moe": lambda: transformers.Qwen2MoeForCausalLM(
        transformers.Qwen2MoeConfig(
            **SMALL, num_attention_heads=4, num_key_value_heads=2, num_experts=6, num_experts_per_tok=3,
            moe_intermediate_size=40, shared_expert_intermediate_size=48,
        )
    ),  # fmt: skip
}


@pytest.mark.parametrize("name", MIXTURES)
def test_experts_give_the_same_logits_and_gradients(name):
    torch.manual_seed(1)
    model = MIXTURES[name]().eval()
    ids = torch.randint(0, 101, (2, 13))

    def run(implementation):
        model.set_experts_implementation(implementation)
        model.zero_grad()
        result = model(ids, labels=ids)
        result.loss.backward()
        return result.logits.detach(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    logits, gradients = run("tessera")
    want, wanted = run("eager")
    torch.testing.assert_close(logits, want, rtol=1e-4, atol=1e-5)
    assert gradients.keys() == wanted.keys() and any("gate_up_proj" in n for n in wanted)
    for n, gradient in gradients.items():
        torch.testing.assert_close(gradient, wanted[n], rtol=1e-3, atol=1e-6, msg=lambda text: f"{n}: {text}")


@pytest.mark.parametrize("approximate", ("none", "tanh"))
def test_the_gelu_of_experts_is_the_one_that_the_module_names(approximate):
    torch.manual_seed(1)
    model = MIXTURES["mixtral"]().eval()
    for module in model.modules():
        if hasattr(module, "gate_up_proj"):
            module.act_fn = torch.nn.GELU(approximate=approximate)
            module.gate_up_proj.data *= 50  # the two differ most near 2
    ids = torch.randint(0, 101, (2, 13))
    results = []
    for implementation in ("tessera", "eager"):
        model.set_experts_implementation(implementation)
        with torch.no_grad():
            results.append(model(ids).logits)
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


def test_experts_that_are_not_supported_are_refused():
    model = MODELS["gpt_oss"]()
    model.set_experts_implementation("tessera")
    with pytest.raises(tessera.Error, match="GptOssExperts has biases"):
        model(torch.zeros(1, 4, dtype=torch.long))
