"""The whole configuration, and what follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from history.epochs.keeper import GROUPS_MAX
from streamer.config import coherence
from streamer.config.sections import (
    AccessSection,
    AdminSection,
    DispatchSection,
    EgressSection,
    EndpointSection,
    EpochsSection,
    ExpressSection,
    FollowSection,
    HistorySection,
    LimitsSection,
    RuleSection,
    Section,
    StreamerSection,
    USubscriptionSection,
)
from uprotocol import uri as uris
from uprotocol.status import invalid


class Config(Section):
    streamer: StreamerSection = StreamerSection()
    admin: AdminSection = AdminSection()
    endpoint: list[EndpointSection] = Field(min_length=1)
    rule: list[RuleSection] = Field(default=[])
    access: list[AccessSection] = Field(default=[])
    follow: list[FollowSection] = Field(default=[])
    epochs: list[EpochsSection] = Field(default=[], max_length=GROUPS_MAX)
    history: HistorySection = HistorySection()
    usubscription: USubscriptionSection = USubscriptionSection()
    egress: EgressSection = EgressSection()
    express: ExpressSection = ExpressSection()
    limits: LimitsSection = LimitsSection()
    dispatch: DispatchSection = DispatchSection()

    @model_validator(mode="after")
    def check_coherence(self) -> Self:
        """Raises what is wrong though each section is right by itself, with the key of each mistake."""
        if mistakes := list(coherence.mistakes_of(self)):
            text = "; ".join(what for what, _ in mistakes)
            raise PydanticCustomError("incoherent", "{text}", {"text": text, "mistakes": mistakes})
        return self

    def with_endpoint(
        self, section: EndpointSection, rules: Sequence[RuleSection] = (), follow: Sequence[FollowSection] = ()
    ) -> Config:
        """With one more endpoint; its rules are those given. Raises INVALID_ARGUMENT if they do not fit."""
        return self._changed(
            endpoint=[*self.endpoint, section], rule=[*self.rules, *rules], follow=[*self.follow, *follow]
        )

    def without_endpoint(self, name: str) -> Config:
        """Without this endpoint, and what names it. Raises INVALID_ARGUMENT if something needs it."""
        return self._changed(
            endpoint=[one for one in self.endpoint if one.name != name],
            rule=[one for one in self.rules if name not in (one.from_, one.to)],
            follow=[one for one in self.follow if one.endpoint != name],
            access=[one for one in self.access if one.endpoint != name],
        )

    def _changed(self, **sections: Any) -> Config:
        try:
            return Config.model_validate({name: getattr(self, name) for name in self.model_fields_set} | sections)
        except ValidationError as error:
            raise invalid("; ".join(one["msg"] for one in error.errors())) from None

    @property
    def authority(self) -> str:
        """The streamer's own authority."""
        if self.streamer.authority is not None:
            return self.streamer.authority
        return next(a for endpoint in self.endpoint for a in endpoint.authorities if not uris.is_pattern(a))

    @property
    def answers_for(self) -> frozenset[str]:
        """Authorities beside its own for which the embedded uSubscription answers; a family at home has no other."""
        if self.usubscription_of(self.home) != "embedded":
            return frozenset()
        if self.usubscription.answers_for is not None:
            return frozenset(self.usubscription.answers_for)
        return frozenset(filter(uris.is_family, self.home.authorities))

    @property
    def home(self) -> EndpointSection:
        """The endpoint on whose network the streamer's own authority lives."""
        return next(endpoint for endpoint in self.endpoint if self.authority in endpoint.authorities)

    def usubscription_of(self, endpoint: EndpointSection) -> Literal["embedded", "remote", "none"]:
        if endpoint.usubscription is not None:
            return endpoint.usubscription
        if endpoint is self.home:
            return "embedded"
        nobody = uris.WILDCARD_AUTHORITY in endpoint.authorities or all(map(uris.is_pattern, endpoint.authorities))
        return "none" if nobody else "remote"

    @property
    def rules(self) -> list[RuleSection]:
        """As written; where none is written, every endpoint to every other."""
        if self.rule:
            return self.rule
        names = [endpoint.name for endpoint in self.endpoint]
        return [RuleSection.model_validate({"from": a, "to": b}) for a in names for b in names if a != b]
