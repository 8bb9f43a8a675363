"""All routes of the task server: each call, its handler, and its answer when that holds a record."""

from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from postroom.calls import agents, goals, messages, server, tasks, tokens
from postroom.calls.verb import engine_verbs
from postroom.contracts.tasks.task_views import TaskInfo
from postroom.core.gate import GATE
from postroom.engine.dlq import DeadLetter
from postroom.engine.inspection import EngineStatus, StoredMessage
from postroom.engine.token_status import TokenStatus
from postroom.goals.goal_cells import Checkpoint, Decision
from postroom.goals.goals import GoalStatus
from postroom.goals.graph.branches import Node
from postroom.server.http.endpoint import ServedRoute, serve
from postroom.server.http.openapi import document
from postroom.server.routes import (
    agent_handlers,
    answers,
    engine_handlers,
    event_streams,
    goal_handlers,
    monitoring,
    task_handlers,
    token_handlers,
)

_HANDLED: Sequence[ServedRoute] = (
    serve(tasks.Next, task_handlers.claim),
    serve(tasks.Complete, task_handlers.complete),
    serve(tasks.Heartbeat, task_handlers.heartbeat),
    serve(tasks.Fail, task_handlers.fail),
    serve(tasks.Release, task_handlers.release),
    serve(tasks.Enqueue, task_handlers.enqueue, many=tasks.EnqueueMany),
    serve(tasks.Result, task_handlers.result),
    serve(tasks.ForemanResult, task_handlers.result),
    serve(tasks.CancelTask, task_handlers.cancel),
    serve(tasks.RetryTask, task_handlers.retry),
    serve(tasks.ShowTask, task_handlers.show, TaskInfo),
    serve(tasks.FindTasks, task_handlers.find, answers.LinesAnswer),
    serve(tasks.ReadTaskStatus, task_handlers.status, answers.StatusAnswer),
    serve(messages.Submit, engine_handlers.submit, many=messages.SubmitMany),
    serve(messages.FindMessages, engine_handlers.find),
    serve(messages.ShowMessage, engine_handlers.show, StoredMessage),
    serve(messages.StreamMessage, engine_handlers.stream),
    serve(messages.Explain, engine_handlers.explain),
    serve(messages.Cancel, engine_handlers.cancel),
    serve(messages.Request, agent_handlers.request_answer),
    serve(agents.ListAgents, agent_handlers.agents, answers.AgentsAnswer),
    serve(agents.Register, agent_handlers.register),
    serve(agents.StreamAgent, agent_handlers.stream),
    serve(agents.Beat, agent_handlers.beat),
    serve(agents.Leave, agent_handlers.leave),
    serve(agents.Ack, agent_handlers.acknowledge),
    serve(agents.Send, agent_handlers.send),
    serve(agents.ReadInbox, agent_handlers.inbox),
    serve(agents.InboxDone, agent_handlers.inbox_done),
    serve(agents.ListBounces, agent_handlers.bounces, answers.BouncesAnswer),
    serve(agents.BouncesDone, agent_handlers.bounces_done),
    serve(messages.ReadReceipts, agent_handlers.receipts),
    serve(messages.ListLetters, engine_handlers.dead_letters, answers.LettersAnswer),
    serve(messages.Replay, engine_handlers.replay),
    serve(messages.Purge, engine_handlers.purge),
    serve(messages.ShowLetter, engine_handlers.dead_letter, DeadLetter),
    serve(messages.ReadEngineStatus, engine_handlers.status, EngineStatus),
    serve(messages.ReadTokenBudgets, engine_handlers.tokens, TokenStatus),
    serve(messages.Pause, engine_handlers.pause),
    serve(messages.Resume, engine_handlers.resume),
    serve(goals.ListGoals, goal_handlers.goals, answers.GoalsAnswer),
    serve(goals.ShowGoal, goal_handlers.goal, GoalStatus),
    serve(goals.ListCheckpoints, goal_handlers.checkpoints, answers.CheckpointsAnswer),
    serve(goals.ListEffects, goal_handlers.effects, answers.EffectsAnswer),
    serve(goals.StartGoal, goal_handlers.start),
    serve(goals.TakeCheckpoint, goal_handlers.checkpoint, Checkpoint),
    serve(goals.CompleteGoal, goal_handlers.complete, GoalStatus),
    serve(goals.FailGoal, goal_handlers.fail, GoalStatus),
    serve(goals.RollBackGoal, goal_handlers.roll_back, GoalStatus),
    serve(goals.ReadContext, goal_handlers.context),
    serve(goals.SetContext, goal_handlers.set_context),
    serve(goals.ReadNode, goal_handlers.node, Node),
    serve(goals.SaveNode, goal_handlers.save_node, Node),
    serve(goals.UpdateNode, goal_handlers.update_node, Node),
    serve(goals.ListDecisions, goal_handlers.decisions, answers.DecisionsAnswer),
    serve(goals.ShowDecision, goal_handlers.decision, Decision),
    serve(goals.Answer, goal_handlers.answer, Decision),
    serve(goals.ListRules, goal_handlers.rules, answers.RulesAnswer),
    serve(goals.ListHeld, goal_handlers.held, answers.HeldAnswer),
    serve(goals.ForgetRule, goal_handlers.forget_rule, answers.RuleAnswer),
    serve(goals.ListConflicts, goal_handlers.conflicts, answers.ConflictsAnswer),
    serve(tokens.ListTokens, token_handlers.tokens),
    serve(tokens.CreateToken, token_handlers.create),
    serve(tokens.RevokeToken, token_handlers.revoke),
    serve(tokens.RotateToken, token_handlers.rotate),
    serve(server.FollowEvents, event_streams.events),
    serve(server.ReadMetrics, monitoring.metrics),
    serve(server.ReadCaller, monitoring.caller),
    serve(server.ReadHealth, monitoring.health, answers.HealthAnswer),
    serve(server.ReadReadiness, monitoring.ready, answers.HealthAnswer),
    serve(server.ListBuses, event_streams.find_buses),
    serve(server.ReadBus, event_streams.read_bus),
    serve(server.PostToBus, event_streams.append_bus),
    serve(server.RemoveBus, event_streams.remove_bus),
    serve(server.ReadOpenApi, monitoring.openapi),
)


_HANDLED_KINDS = {kind for served in _HANDLED for kind in served.kinds}

ROUTES: Sequence[ServedRoute] = (
    *_HANDLED,
    *(serve(verb, engine_handlers.by_engine) for verb in engine_verbs() if verb not in _HANDLED_KINDS),
)


def openapi() -> dict[str, Any]:
    """The OpenAPI document of the server."""
    open_paths = [served.route.path for served in ROUTES if GATE[served.route.permission].who == "anybody"]
    return document(ROUTES, version("postroom"), open_paths)
