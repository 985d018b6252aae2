"""The models of a key: which it is shown, and how one is refused that is unknown, not granted, or no name."""

from __future__ import annotations

from typing import Any

from tests.gateway.bad_requests import MODEL, assert_refused, body, send


async def test_an_unknown_model_is_404(world: Any) -> None:
    assert_refused(world, await send(world, body(model="gpt-9")), 404, "model_not_found", "model")


async def test_a_tenant_without_any_class_sees_no_model(world: Any) -> None:
    authorization = f"Bearer {world.keys['stranger']}"
    assert_refused(world, await send(world, body(), authorization=authorization), 404, "model_not_found", "model")


async def test_a_very_long_model_name_is_not_echoed_whole(world: Any) -> None:
    name = "m" * 5_000
    asked = await send(world, body(model=name))
    assert_refused(world, asked, 400, "invalid_value", "model")
    fetched = await send(world, b"", method="GET", path=f"/v1/models/{name}")
    assert_refused(world, fetched, 404, "model_not_found", "model")
    assert "m" * 201 not in asked.text + fetched.text


async def test_the_model_list_shows_context_length_and_the_tiers_this_key_may_use(world: Any) -> None:
    (model,) = [model async for model in world.client("bulk").models.list()]
    assert (model.id, model.object) == (MODEL, "model")
    assert (model.context_length, model.service_tiers) == (32_768, ["default", "flex"])
    assert (await world.client().models.retrieve(MODEL)).id == MODEL


async def test_a_model_that_is_not_granted_is_answered_like_one_that_is_not_there(world: Any) -> None:
    answers = []
    for tenant, model in (("stranger", MODEL), ("aurora", "gpt-9")):
        response = await send(
            world, b"", method="GET", path=f"/v1/models/{model}", authorization=f"Bearer {world.keys[tenant]}"
        )
        assert_refused(world, response, 404, "model_not_found", "model")
        answers.append(response.text.replace(model, "MODEL"))
    assert answers[0] == answers[1]
    assert [model async for model in world.client("stranger").models.list()] == []
