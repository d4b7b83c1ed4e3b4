"""Has an answer take the shape of a class: the engine can write nothing else."""

import os
from typing import Annotated

from openai import OpenAI
from pydantic import BaseModel, StringConstraints


class City(BaseModel):
    name: Annotated[str, StringConstraints(max_length=20)]
    is_capital: bool


client = OpenAI()
answer = client.chat.completions.parse(
    model=os.environ["MODEL"],
    messages=[{"role": "user", "content": "Name a city."}],
    response_format=City,
    max_tokens=128,
)
city = answer.choices[0].message.parsed
print(f"{city.name}: {'a' if city.is_capital else 'no'} capital")
