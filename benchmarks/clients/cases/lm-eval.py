import json
import os
import pathlib
import tempfile

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"
import check
import lm_eval
from lm_eval.tasks import TaskManager

folder = pathlib.Path(tempfile.mkdtemp())
rows = [{"q": "1 + 1 =", "a": " 2", "b": " 7"}, {"q": "x", "a": " = 1", "b": " zz"}]
(folder / "data.json").write_text("\n".join(map(json.dumps, rows)))
HEAD = f"""
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/data.json}}}}
test_split: test
doc_to_text: "{{{{q}}}}"
"""
(folder / "pick.yaml").write_text(
    f"task: pick\noutput_type: multiple_choice{HEAD}"
    'doc_to_choice: ["{{a}}", "{{b}}"]\ndoc_to_target: 0\nmetric_list: [{metric: acc}]\n'
)
(folder / "say.yaml").write_text(
    f"task: say\noutput_type: generate_until{HEAD}"
    'doc_to_target: "{{a}}"\ngeneration_kwargs: {until: ["\\n"], max_gen_toks: 8}\n'
    "metric_list: [{metric: exact_match}]\n"
)


def evaluate(kind, path, task):
    args = f"model={check.NAME},base_url={check.URL}/v1/{path},num_concurrent=2,max_retries=1"
    if task == "pick":  # lm-eval measures the lengths of continuations by itself
        args += f",tokenizer={os.environ['MODEL_FOLDER']},tokenizer_backend=huggingface"
    else:
        args += ",tokenizer_backend=None,tokenized_requests=False"
    found = lm_eval.simple_evaluate(
        kind,
        model_args=args,
        tasks=[task],
        task_manager=TaskManager(include_path=str(folder)),
        apply_chat_template=kind == "local-chat-completions",
    )
    return found["results"][task]


def local_completions():
    assert evaluate("local-completions", "completions", "pick")["acc,none"] in (0, 0.5, 1)


def local_completions_generate():
    assert "exact_match,none" in evaluate("local-completions", "completions", "say")


def local_chat_completions():
    assert "exact_match,none" in evaluate("local-chat-completions", "chat/completions", "say")


check.run(local_completions, local_completions_generate, local_chat_completions)
