//! Stream of one agent. The agent sends a registration, then reports and answers. The controller sends the agent's
//! configuration, at once and at every change, and queries.

use std::sync::Arc;
use std::time::Duration;

use coreward_rpc::invalid_argument_status;
use coreward_tls::FleetRole;
use coreward_wire::sanitize::sanitize_string;
use coreward_wire::v1::agent_message::Message;
use coreward_wire::v1::agent_update::Update;
use coreward_wire::{AgentReport, SocketAnswer, v1};
use tokio::sync::mpsc;
use tokio_stream::{Stream, StreamExt as _};
use tonic::{Code, Status};

use super::controller_state::ControllerState;
use super::leader_election::not_leading_status;
use super::rejection_status::grpc_status_for_rejection;
use coreward_controller::AgentSession;
use coreward_controller::racks::RackRelay;
use coreward_listener::security::AuthenticatedPeer;

/// Delay before a rejected registration is answered.
const REGISTRATION_REJECTION_DELAY: Duration = Duration::from_secs(1);

type AgentUpdateSender = mpsc::Sender<Result<v1::AgentUpdate, Status>>;

/// Stream of messages from one agent, which is connected directly or through its rack.
pub trait AgentMessageStream: Stream<Item = Result<v1::AgentMessage, Status>> + Unpin {}

impl<S: Stream<Item = Result<v1::AgentMessage, Status>> + Unpin> AgentMessageStream for S {}

pub enum AgentReportSource {
    Agent(AuthenticatedPeer),
    /// The rack relays the agent's messages, and has authenticated the agent.
    Rack(RackRelay),
}

impl AgentReportSource {
    /// Returns the relay through a rack, or `None` if the agent is connected directly. Fails if the peer may not report
    /// for the server.
    fn authorized_relay(&self, server: &str) -> Result<Option<RackRelay>, Status> {
        match self {
            Self::Agent(peer) => peer.require_role_and_name(FleetRole::Agent, server).map(|()| None),
            Self::Rack(relay) => Ok(Some(relay.clone())),
        }
    }

    /// Returns the network address of the agent, if it is connected directly.
    fn peer_address(&self) -> Option<String> {
        match self {
            Self::Agent(peer) => Some(peer.caller.to_string()),
            Self::Rack(_) => None,
        }
    }

    fn rack_name(&self) -> Option<&str> {
        match self {
            Self::Agent(_) => None,
            Self::Rack(relay) => Some(&relay.rack_name),
        }
    }
}

pub async fn serve_agent(
    controller_state: Arc<ControllerState>,
    source: AgentReportSource,
    mut messages: impl AgentMessageStream,
    update_sender: AgentUpdateSender,
) {
    let session = match register_agent(&controller_state, &source, &mut messages).await {
        Ok(session) => session,
        Err(status) => {
            tracing::warn!(
                event = "agent-rejected",
                peer = source.peer_address(),
                rack = source.rack_name(),
                error = status.message(),
                "the controller rejects the registration of an agent"
            );
            send_delayed_rejection(status, &update_sender).await;
            return;
        }
    };
    tracing::info!(
        event = "agent-connected",
        server = session.server_name(),
        peer = source.peer_address(),
        rack = source.rack_name(),
        "the server's agent has registered with the controller"
    );
    let outcome = tokio::select! {
        outcome = serve_registered_agent(&controller_state, &session, &mut messages, &update_sender) => outcome,
        _ = controller_state.wait_until_deposed() => Err(not_leading_status(None)),
    };
    controller_state.socket_query_relay.forget_agent(session.session_number());
    controller_state.lock_controller().end_session(&session);
    log_agent_disconnect(session.server_name(), outcome.as_ref().err());
    if let Err(status) = outcome {
        let _ = update_sender.send(Err(status)).await;
    }
}

fn log_agent_disconnect(server: &str, error: Option<&Status>) {
    match error {
        None => tracing::info!(
            event = "agent-disconnected",
            server,
            "the server's agent has closed its stream to the controller"
        ),
        Some(status) => tracing::warn!(
            event = "agent-lost",
            server,
            error = status.message(),
            "the stream from the server's agent has failed: check the agent if it does not reconnect"
        ),
    }
}

/// Sends the error after a delay and ends the stream. Because a connection has a limited number of streams, the delay
/// limits the rate of rejections. There is no delay if the agent replaces another one or searches for the leader.
async fn send_delayed_rejection(status: Status, update_sender: &AgentUpdateSender) {
    if !matches!(status.code(), Code::AlreadyExists | Code::Unavailable) {
        tokio::select! {
            () = tokio::time::sleep(REGISTRATION_REJECTION_DELAY) => {}
            () = update_sender.closed() => return tokio::time::sleep(REGISTRATION_REJECTION_DELAY).await,
        }
    }
    let _ = update_sender.send(Err(status)).await;
}

async fn register_agent(
    controller_state: &ControllerState,
    source: &AgentReportSource,
    messages: &mut impl AgentMessageStream,
) -> Result<AgentSession, Status> {
    let first_message = tokio::time::timeout(coreward_listener::STREAM_REGISTRATION_TIMEOUT, messages.next()).await;
    let message = first_message.map_err(|_| Status::deadline_exceeded("no registration received"))?.transpose()?;
    let first_message = message.and_then(|message| message.message);
    let Some(Message::Registration(registration)) = first_message else {
        return Err(Status::invalid_argument("an agent's first message: expected a registration"));
    };
    let (server, version) = (sanitize_string(registration.server), sanitize_string(registration.version));
    let relay = source.authorized_relay(&server)?;
    let now = controller_state.now();
    let session = controller_state.lock_controller().register_agent_with_relay(&server, &version, relay, now);
    session.map_err(|rejection| grpc_status_for_rejection(&rejection))
}

async fn serve_registered_agent(
    controller_state: &ControllerState,
    session: &AgentSession,
    messages: &mut impl AgentMessageStream,
    update_sender: &AgentUpdateSender,
) -> Result<(), Status> {
    let mut configuration_version_receiver = controller_state.subscribe_to_agent_configuration_version();
    configuration_version_receiver.mark_changed();
    let mut query_receiver = controller_state.socket_query_relay.register_agent(session.session_number());
    let send_update = async |update: Update| {
        controller_state.is_leading() && update_sender.send(Ok(v1::AgentUpdate { update: Some(update) })).await.is_ok()
    };
    let mut rejection_log = ReportRejectionLog::default();
    loop {
        tokio::select! {
            message = next_agent_message(controller_state, session, messages, &mut rejection_log) => match message? {
                Some(message) => process_agent_message(controller_state, session, message, &mut rejection_log)?,
                None => return Ok(()),
            },
            changed = configuration_version_receiver.changed() => {
                if changed.is_err() {
                    return Ok(());
                }
                configuration_version_receiver.mark_unchanged();
                let configuration = controller_state.lock_controller().agent_configuration(session);
                let configuration = configuration.map_err(|rejection| grpc_status_for_rejection(&rejection))?;
                if !send_update(Update::Configuration((&configuration).into())).await {
                    return Ok(());
                }
            }
            Some(query) = query_receiver.recv() => {
                if !send_update(Update::SocketQuery((&query).into())).await {
                    return Ok(());
                }
            }
        }
    }
}

/// Processes a message other than the registration. Fails if the agent's stream must end.
fn process_agent_message(
    controller_state: &ControllerState,
    session: &AgentSession,
    message: Message,
    rejection_log: &mut ReportRejectionLog,
) -> Result<(), Status> {
    match message {
        Message::Report(report) => record_agent_report(controller_state, session, report, rejection_log),
        Message::SocketAnswer(answer) => {
            let answer = SocketAnswer::try_from(answer).map_err(invalid_argument_status)?;
            if !controller_state.socket_query_relay.relay_answer(session.session_number(), answer) {
                controller_state.lock_controller().count_unsolicited_message(session, controller_state.now());
            }
            Ok(())
        }
        Message::Registration(_) => Err(Status::invalid_argument("a second registration: expected reports")),
    }
}

/// Returns the agent's next message. While the agent exceeds its message rate, nothing is read or decoded. Its messages
/// then wait in its connection, where HTTP/2's flow control stops the agent.
async fn next_agent_message(
    controller_state: &ControllerState,
    session: &AgentSession,
    messages: &mut impl AgentMessageStream,
    rejection_log: &mut ReportRejectionLog,
) -> Result<Option<Message>, Status> {
    loop {
        let wait_time = controller_state.lock_controller().time_until_next_message(session, controller_state.now());
        if wait_time.is_zero() {
            break;
        }
        if !std::mem::replace(&mut rejection_log.is_reading_paused, true) {
            controller_state.lock_controller().count_delayed_message(session);
            rejection_log.log_rate_limit(session);
        }
        tokio::time::sleep(wait_time).await;
    }
    let message = messages.next().await.transpose()?;
    rejection_log.is_reading_paused = false;
    Ok(message.and_then(|message| message.message))
}

/// Records an agent's report. An invalid report is counted and logged, but the stream ends only if the session has
/// ended.
fn record_agent_report(
    state: &ControllerState,
    session: &AgentSession,
    report: v1::Report,
    rejection_log: &mut ReportRejectionLog,
) -> Result<(), Status> {
    let report = AgentReport::try_from(report);
    let now = state.now();
    let report_result = state.lock_controller().record_report(session, report, now);
    match report_result {
        Ok(()) => {
            rejection_log.last_reason = None;
            state.on_loads_updated();
        }
        Err(rejection) if rejection.ends_session() => return Err(grpc_status_for_rejection(&rejection)),
        Err(rejection) => rejection_log.log_rejected_report(session, &rejection),
    }
    Ok(())
}

/// Log of rejected reports, in which a repeated rejection is logged once and not ten times per second.
#[derive(Default)]
struct ReportRejectionLog {
    last_reason: Option<&'static str>,
    /// Whether reading is paused because the agent sends too many messages.
    is_reading_paused: bool,
    was_delay_logged: bool,
}

impl ReportRejectionLog {
    fn log_rejected_report(
        &mut self,
        session: &AgentSession,
        rejection: &coreward_controller::message_rejection::MessageRejection,
    ) {
        if self.last_reason != Some(rejection.counter_name()) {
            tracing::warn!(
                event = "report-rejected",
                server = session.server_name(),
                reason = rejection.counter_name(),
                error = %rejection,
                "the controller rejects a report of the server's agent: repetitions for this reason are not logged"
            );
        }
        self.last_reason = Some(rejection.counter_name());
    }

    fn log_rate_limit(&mut self, session: &AgentSession) {
        if !std::mem::replace(&mut self.was_delay_logged, true) {
            let server = session.server_name();
            tracing::warn!(
                event = "reports-delayed",
                server,
                "the agent sends more than two messages per report interval: the controller delays the others"
            );
        }
    }
}
