"""Word lists shared by the generated families."""

from __future__ import annotations

from recipes.scoring import BOYS as BOYS
from recipes.scoring import GIRLS as GIRLS


def _words(text: str) -> list[str]:
    return text.split()


def _phrases(text: str) -> list[str]:
    return text.split("|")


THINGS = _words(
    "apples oranges pears plums nuts eggs cookies cakes candles marbles stamps shells stones coins "
    "buttons beads pencils pens books cards stickers balloons flowers roses kites ribbons bricks "
    "boats toys keys"
)
CONTAINERS = _words("box bag basket jar crate drawer")
PLURAL_CONTAINERS = {
    "box": "boxes",
    "bag": "bags",
    "basket": "baskets",
    "jar": "jars",
    "crate": "crates",
    "drawer": "drawers",
}
COLORS = _words("red blue green yellow white black brown grey golden silver purple pink orange")
SIZES = _words("small big old new tiny heavy round wooden broken shiny little large")
JOBS = _words(
    "baker teacher doctor farmer sailor painter gardener tailor cook driver miller smith nurse "
    "writer singer hunter carpenter fisherman shepherd shoemaker"
)
TOWNS = _words(
    "Ashford Millbrook Riverton Oakdale Greenhill Westport Stonefield Fairview Kingsbury Northgate "
    "Lakewood Redcliff Elmwood Silverton Brookside Hilltop Sandford Marlow Whitby Dunmore"
)
PLACES = _phrases(
    "under the bed|behind the door|on the kitchen table|in the garden|near the old mill|"
    "by the window|in the attic|under the stairs|beside the well|in the barn|on the top shelf|"
    "behind the oak tree|in the cellar|next to the gate|at the back of the shop|"
    "under the stone bridge"
)
OBJECTS = _words(
    "lamp key cup hat coat ring clock chair bottle letter mirror blanket knife spoon drum violin "
    "map candle basket umbrella bell shoe coin book kettle ladder hammer pillow bucket scarf"
)
ANIMALS = _words(
    "dog cat horse cow pig sheep goat duck goose hen rabbit fox wolf bear lion tiger mouse frog "
    "donkey owl"
)
DAYS = _words("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _words(
    "January February March April May June July August September October November December"
)
NUMBER_WORDS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
)
