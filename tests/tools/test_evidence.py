"""The pictures of the comparison are drawn from its tables."""

import pytest

from tools.compare import evidence

TABLE = """vocabulary,seq_len,arm,parameters,tokens,max_lr,seed,loss
bytes,256,log_space_forgets,10,100,0.1,1,2.0
bytes,256,log_space_forgets,10,100,0.2,1,1.5
bytes,256,log_space_forgets,10,100,0.2,2,1.7
bytes,512,softmax_forgets_rotary,10,100,0.2,1,1.4
gpt2,256,log_space_forgets,10,100,0.2,1,1.0
"""

CURVES = """arm,seq_len,tokens,loss
softmax_forgets_rotary,512,100,2.0
softmax_forgets_rotary,512,200,1.5
hybrid_second,512,100,1.75
"""

TRANSFER = """optimizer,over,transfer,size,rate,loss
muon,width,,32,0.01,2.5
muon,width,,32,0.1,2.0
muon,width,,32,1.0,2.5
muon,width,,64,0.01,2.0
muon,width,yes,64,0.1,1.75
"""

RECALL = """task,attention,machine,head_dim,trained_at,tested_at,accuracy
mqar,softmax,A,16,4,4,0.75
mqar,softmax,A,16,8,8,0.5
mqar,softmax,A,8,8,8,0.25
passkey,window,A,16,256,1024,0.25
passkey,window,A,16,256,256,1.0
"""

FLAGSHIP = """options,machine,parameters,seed,steps,step,tokens,val_loss
model=softmax_1m,A,10,1,8192,1,100,2.0
model=softmax_1m,A,10,2,8192,1,100,3.0
model=softmax_1m,A,10,2,8192,2,200,1.0
model=flagship_1m,A,10,1,8192,1,100,1.5
model=flagship_1m,A,10,2,8192,1,100,2.75
model=flagship_1m,A,10,3,8192,2,200,0.5
model=flagship_1m,A,10,1,2048,2048,2097152,1.0
model=flagship_1m,B,10,1,2048,2048,2097152,9.0
model=flagship_1m model.block.conv=0,A,10,1,2048,2048,2097152,1.25
"""


def test_the_table_has_every_model_that_is_drawn():
    runs = evidence.read_flagship(evidence.DOCS / "flagship.csv")
    assert {(options, steps) for *pair, steps in evidence._PAIRS.values() for options in pair} <= runs.keys()
    assert {(options, evidence._PARTS_STEPS) for options in evidence._PARTS.values()} <= runs.keys()


def test_the_pictures_show_the_tables(tmp_path, monkeypatch):
    tables = {"attention_forgets": TABLE, "attention_curves": CURVES, "flagship": FLAGSHIP}
    tables |= {"transfer": TRANSFER, "recall": RECALL}
    for name, text in tables.items():
        (tmp_path / f"{name}.csv").write_text(text)
    losses = evidence.read(tmp_path / "attention_forgets.csv")
    assert losses["log_space_forgets", 256, 100] == {1: 1.5, 2: 1.7}  # at the best learning rate
    assert losses["softmax_forgets_rotary", 512, 100] == {1: 1.4}
    drawn = []
    monkeypatch.setattr(evidence, "DOCS", tmp_path)
    monkeypatch.setattr(evidence, "png", lambda figure: drawn.append(figure) or b"picture")
    evidence.main()
    (pairs, parts), (losses, above), transfer, recall = (figure.axes for figure in drawn)
    assert [[list(line.get_ydata()) for line in axes.lines] for axes in recall] == [[[0.75, 0.5]], [[1.0, 0.25]]]
    assert [list(line.get_ydata()) for line in pairs.lines] == [[-0.375], [-0.5, -0.25], [0, 0]]
    assert [label.get_text() for label in parts.get_yticklabels()] == ["convolutions: 0.250"]
    assert [bar.get_width() for bar in parts.patches] == [0.25]
    assert [list(line.get_ydata()) for line in above.lines] == [[0, 0], [-0.25]]
    assert [line.get_label() for line in losses.lines if "M" in str(line.get_label())] == [
        "softmax, forget gate, rotary (control), 2 M",
        "log-space that forgets (the flagship's form), 0.4 M",
    ]
    assert [[list(line.get_ydata()) for line in axes.lines] for axes in transfer] == [
        [[2.5, 2.0, 2.5], [pytest.approx(2.0)], [2.0]],
        [[2.5, 2.0, 2.5], [pytest.approx(2.0)], [1.75]],
    ]  # the star is between the runs beside the best
    pictures = {"flagship.png", "attention_forgets.png", "transfer.png", "recall.png"}
    assert {path.name for path in tmp_path.glob("*.png")} == pictures
