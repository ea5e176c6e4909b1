"""The small knowledge base behind the chat family."""

from __future__ import annotations


def _table(text: str) -> list[tuple[str, ...]]:
    return [tuple(cell.strip() for cell in row.split(",")) for row in text.strip().splitlines()]


# country, capital, language
COUNTRIES = _table("""
Germany, Berlin, German
France, Paris, French
Italy, Rome, Italian
Spain, Madrid, Spanish
Portugal, Lisbon, Portuguese
England, London, English
Greece, Athens, Greek
Poland, Warsaw, Polish
Austria, Vienna, German
Sweden, Stockholm, Swedish
Norway, Oslo, Norwegian
Denmark, Copenhagen, Danish
Finland, Helsinki, Finnish
Hungary, Budapest, Hungarian
Russia, Moscow, Russian
Japan, Tokyo, Japanese
China, Beijing, Chinese
Egypt, Cairo, Arabic
Turkey, Ankara, Turkish
Ireland, Dublin, English
Iceland, Reykjavik, Icelandic
Cuba, Havana, Spanish
""")

# animal, young, sound, legs, food, home
ANIMALS = _table("""
dog, puppy, barks, four, meat, a kennel
cat, kitten, meows, four, fish, a house
horse, foal, neighs, four, hay, a stable
cow, calf, moos, four, grass, a barn
pig, piglet, grunts, four, corn, a sty
sheep, lamb, bleats, four, grass, a meadow
goat, kid, bleats, four, leaves, a meadow
hen, chick, clucks, two, seeds, a coop
duck, duckling, quacks, two, water plants, a pond
goose, gosling, honks, two, grass, a pond
lion, cub, roars, four, meat, the grassland
bear, cub, growls, four, berries, a cave
wolf, pup, howls, four, meat, the forest
frog, tadpole, croaks, four, flies, a pond
owl, owlet, hoots, two, mice, a tree
bee, larva, buzzes, six, nectar, a hive
donkey, foal, brays, four, hay, a stable
mouse, pup, squeaks, four, cheese, a hole
crow, chick, caws, two, seeds, a nest
snake, snakelet, hisses, no, mice, a hole
""")

OPPOSITES = _table("""
big, small
hot, cold
old, young
fast, slow
high, low
good, bad
happy, sad
light, dark
rich, poor
hard, soft
wet, dry
full, empty
early, late
strong, weak
long, short
clean, dirty
near, far
loud, quiet
thick, thin
open, closed
left, right
brave, cowardly
sweet, sour
heavy, light
""")

PLURALS = _table("""
child, children
man, men
woman, women
foot, feet
tooth, teeth
goose, geese
mouse, mice
leaf, leaves
knife, knives
wolf, wolves
city, cities
baby, babies
box, boxes
fish, fish
sheep, sheep
ox, oxen
""")

# thing, colour
COLORS = _table("""
grass, green
snow, white
coal, black
blood, red
the sky, blue
a lemon, yellow
a carrot, orange
milk, white
a strawberry, red
chocolate, brown
a raven, black
a leaf in summer, green
the sun, yellow
an elephant, grey
salt, white
""")

# thing, what one does with it
USES = _table("""
a knife, cut bread
a pen, write a letter
a hammer, drive in nails
a broom, sweep the floor
a needle, sew clothes
a lamp, light a room
a key, open a door
a cup, drink tea
a spoon, eat soup
a boat, cross the water
a clock, tell the time
a saw, cut wood
a bed, sleep at night
an umbrella, keep off the rain
a ladder, climb up high
a rope, tie things together
a map, find the way
a kettle, boil water
a book, read stories
soap, wash your hands
""")

# person, what the person does
WORKERS = _table("""
baker, bakes bread
teacher, teaches children
doctor, helps sick people
farmer, grows food
tailor, makes clothes
cook, prepares meals
painter, paints pictures
sailor, sails on ships
shoemaker, makes and mends shoes
gardener, looks after plants
writer, writes books
miller, grinds grain into flour
carpenter, makes things of wood
smith, makes things of iron
shepherd, looks after sheep
hunter, hunts wild animals
""")
