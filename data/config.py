"""Settings of what training reads."""

from typing import Annotated, Literal

from pydantic import Field

from common.settings import Settings

Weights = dict[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]]


class DataConfig(Settings, defaults="train:data"):
    """How training reads the dataset."""

    mixture: Weights | None
    """Weights of the dataset's sets, such as {Pile-CC: 2, Github: 0.5}.

    A set's share of the sequences is its weight times its windows, divided by the sum of that over
    all sets. Sets that are not named have weight 1; 0 leaves a set out. A window of seq_len tokens
    belongs to the set that most of its tokens are from. null: the corpus as it is, every window
    once an epoch.
    """
    document_reset: bool
    """Whether the documents of a window don't see each other. Conversations never do.

    The <|endoftext|> that ends a document begins the next.
    """
    loss: Literal["all", "answers"]
    """Which tokens are targets: all, or in conversations the assistant's and <|end|> after them.

    With answers, rows are whole conversations, as data/conversations.py packs them.
    """

    @property
    def keeps_apart(self) -> bool:
        """Whether documents don't see each other."""
        return self.document_reset or self.loss == "answers"

    def reset_at(self, eot_id: int) -> int | None:
        """The id of <|endoftext|> if documents are kept apart, else None."""
        return eot_id if self.keeps_apart else None
