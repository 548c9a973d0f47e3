"""Keys of sentence_bert_config.json: honoured, done anyway, without effect, or rejected by name."""

import json

import pytest

from rooflax.errors import CheckpointError, UnsupportedModelError
from rooflax.loading.transformer_settings import (
    ACCEPTED,
    ANY,
    CLASSIFY,
    EMBED,
    GENERATE,
    TransformerSettings,
    read_transformer,
    transformer_file,
)

OTHER = {
    "max_seq_length": "long",
    "do_lower_case": True,
    "unpad_inputs": None,
    "query_length": 32,
    "document_length": 180,
    "query_expansion": {"strategy": "fixed", "length": 32},
    "tokenizer_name_or_path": "bert-base-uncased",
    "model_kwargs": {"rope_scaling": {"factor": 2}},
    "config_kwargs": {"rotary_scaling_factor": 2},
    "processor_kwargs": {"model_max_length": 0},
    "processing_kwargs": {"text": {"max_length": 5}},
}
"""Of each key of `ACCEPTED` a value that is rejected; None where there is none."""
TASKS = {"embed": EMBED, "classify": CLASSIFY, "generate": GENERATE}


@pytest.fixture
def read(tmp_path, write_folder):
    write_folder(tmp_path, "qwen")
    (tmp_path / "modules.json").write_text("[]")

    def make(task=EMBED, name="sentence_bert_config.json", **settings):
        (tmp_path / name).write_text(json.dumps(settings))
        return read_transformer(tmp_path, task)

    return make


def test_every_accepted_key_has_another_value_in_this_test():
    assert OTHER.keys() == ACCEPTED.keys()


@pytest.mark.parametrize("key", OTHER)
def test_another_value_is_rejected_by_name(read, key):
    read(**{key: None})
    if OTHER[key] is None:
        assert ACCEPTED[key] is ANY
        return
    inner = next(iter(OTHER[key])) if isinstance(OTHER[key], dict) and ACCEPTED[key] else key
    rejected = UnsupportedModelError, CheckpointError
    with pytest.raises(rejected, match=rf"sentence_bert_config.json of .*(has |\.){inner}"):
        read(**{key: OTHER[key]})


def test_keys_that_nobody_knows_are_rejected_by_name(read):
    for settings, said in (
        ({"pool": "cls"}, "has pool = 'cls'"),
        ({"model_args": {"x": 1}}, "has model_kwargs.x = 1"),
        ({"transformer_task": "fill-mask"}, "has transformer_task = 'fill-mask'"),
        ({"module_output_name": "scores"}, "has module_output_name = 'scores'"),
        ({"modality_config": {"text": {"method": "encode"}}}, "has modality_config.text.method"),
        ({"modality_config": {"message": {}}}, "has modality_config.message"),
        ({"modality_config": 5}, "has modality_config = 5"),
    ):
        with pytest.raises(UnsupportedModelError, match=f"sentence_bert_config.json of .* {said}"):
            read(**settings)


def test_what_changes_no_vector_is_no_error(read):
    how = {"method": "forward", "method_output_name": "last_hidden_state"}
    settings = read(
        max_seq_length=512,
        unpad_inputs=False,
        model_args={"attn_implementation": "sdpa", "torch_dtype": "bfloat16"},
        tokenizer_args={"padding_side": "left", "trust_remote_code": True},
        config_args={},
        modality_config={"text": how, "image": {"method": "get_image_features"}},
        module_output_name="token_embeddings",
        processing_kwargs={"text": {"padding": "longest"}},
        query_length=None,
    )
    assert settings.max_tokens == 512


def test_the_processors_length_counts_before_the_modules(read):
    assert read(max_seq_length=9, processor_kwargs={"model_max_length": 7}).max_tokens == 7


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("begins", [True, False])
def test_what_is_written_is_read(read, task, begins):
    settings = TransformerSettings(99, begins or task != "generate")
    written = transformer_file(TASKS[task], settings)
    assert read(TASKS[task], **written) == settings
    others = [other for other in TASKS if other != task]
    for other in others if task != "embed" else ():
        with pytest.raises(UnsupportedModelError, match="has transformer_task = "):
            read(TASKS[other], **written)


def test_a_chat_template_is_used_where_texts_become_messages(read):
    how = {"method": "forward", "method_output_name": "logits"}
    with pytest.raises(UnsupportedModelError, match="has modality_config = "):
        read(GENERATE, modality_config={"text": how})
    with pytest.raises(UnsupportedModelError, match="message.format = 'structured'"):
        read(GENERATE, modality_config={"message": how | {"format": "structured"}})
    assert read(GENERATE).generation_prompt
    assert not read(GENERATE, modality_config={"message": how}).generation_prompt
