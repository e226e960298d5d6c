"""The picture of the comparison is drawn from its tables."""

import pytest

from tools.compare import evidence

TABLE = """vocabulary,seq_len,arm,parameters,tokens,max_lr,seed,loss
bytes,256,log_space_forgets,10,100,0.1,1,2.0
bytes,256,log_space_forgets,10,100,0.2,1,1.5
bytes,256,log_space_forgets,10,100,0.2,2,1.7
bytes,256,log_space_forgets_no_gate,10,100,0.2,1,1.9
bytes,512,softmax_forgets_rotary,10,100,0.2,1,1.4
gpt2,256,log_space_forgets,10,100,0.2,1,1.0
"""

CURVES = """arm,seq_len,tokens,loss
softmax_forgets_rotary,512,100,2.0
softmax_forgets_rotary,512,200,1.5
hybrid_second,512,100,1.75
"""

NGRAMS = """model,ngrams,parameters,seed,step,tokens,val_loss
gpt_1m,"[2,3,4,5,6,8,12,16]",10,1,1,100,2.0
gpt_1m,"[2,3,4,5,6,8,12,16]",10,2,1,100,3.0
gpt_1m,"[2,3,4,5,6,8,12,16]",10,2,2,200,1.0
log_gpt2_1m,"[2,3,4,5,6,8,12,16]",10,1,1,100,1.5
log_gpt2_1m,"[2,3,4,5,6,8,12,16]",10,2,1,100,2.75
log_gpt2_1m,"[3,5,8]",10,2,2,200,0.5
"""


def test_the_table_of_ngrams_has_every_model_that_is_drawn():
    models = {row["model"] for row in evidence._rows(evidence.NGRAMS) if row["ngrams"] == evidence._NGRAMS}
    assert {name for pair in evidence._SHIPPED.values() for name in pair} <= models


def test_runs_count_at_the_best_learning_rate(tmp_path, monkeypatch):
    table = tmp_path / "runs.csv"
    table.write_text(TABLE)
    losses = evidence.read(table)
    assert losses["log_space_forgets", 256, 100] == {1: 1.5, 2: 1.7}
    assert losses["softmax_forgets_rotary", 512, 100] == {1: 1.4}
    drawn = []
    (curves := tmp_path / "curves.csv").write_text(CURVES)
    (ngrams := tmp_path / "ngrams.csv").write_text(NGRAMS)
    for name, path in (("TABLE", table), ("CURVES", curves), ("NGRAMS", ngrams)):
        monkeypatch.setattr(evidence, name, path)
    monkeypatch.setattr(evidence, "png", lambda figure: drawn.append(figure) or b"picture")
    evidence.main()
    shipped, losses, above, parts = drawn[0].axes
    mean, seeds, zero = (list(line.get_ydata()) for line in shipped.lines)
    assert (mean, seeds, zero) == ([-0.375], [-0.5, -0.25], [0, 0])
    assert [list(line.get_ydata()) for line in above.lines] == [[0, 0], [-0.25]]
    assert [line.get_label() for line in losses.lines if "M" in str(line.get_label())] == [
        "softmax, forget gate, rotary (control), 2 M",
        "log-space that forgets (flagship), 0.4 M",
    ]
    assert [bar.get_width() for bar in parts.patches] == [pytest.approx(1.9 - 1.5)]
    assert table.with_suffix(".png").read_bytes() == b"picture"
