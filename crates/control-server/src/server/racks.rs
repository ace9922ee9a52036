//! Stream of one rack. The rack sends a registration, then summaries and its agents' messages. The controller sends
//! configurations of the rack and updates for its agents. Each agent behind a rack is served like a direct one
//! ([`super::agents`]).

use std::collections::HashMap;
use std::sync::Arc;

use coreward_tls::FleetRole;
use coreward_wire::sanitize::sanitize_string;
use coreward_wire::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::agents;
use super::agents::AgentReportSource;
use super::controller_state::ControllerState;
use super::leader_election::not_leading_status;
use super::rejection_status::grpc_status_for_rejection;
use coreward_controller::message_rejection::MessageRejection;
use coreward_controller::racks::RackRelay;
use coreward_listener::security::AuthenticatedPeer;

type RackUpdateSender = mpsc::Sender<Result<v1::RackUpdate, Status>>;
/// Sender of the queue through which an agent's messages reach its task.
type AgentMessageSender = mpsc::Sender<Result<v1::AgentMessage, Status>>;

/// Maximum number of one agent's messages that wait in its queue. If the queue is full, the rack's stream waits.
const MAX_QUEUED_AGENT_MESSAGES: usize = 4;
/// Maximum number of agents' streams through one rack, which is the number of server ids.
const MAX_AGENTS_PER_RACK: usize = 16_384;

pub async fn serve_rack(
    controller_state: Arc<ControllerState>,
    peer: AuthenticatedPeer,
    mut messages: Streaming<v1::RackMessage>,
    update_sender: RackUpdateSender,
) {
    let (name, session) = match register_rack(&controller_state, &peer, &mut messages).await {
        Ok(name_and_session) => name_and_session,
        Err(status) => {
            tracing::warn!(
                event = "rack-rejected",
                peer = %peer.caller,
                error = status.message(),
                "the controller rejects the registration of a rack controller"
            );
            let _ = update_sender.send(Err(status)).await;
            return;
        }
    };
    tracing::info!(event = "rack-connected", rack = name, peer = %peer.caller, "the rack controller has registered");
    tokio::select! {
        () = process_rack_messages(&controller_state, &name, session, &mut messages, &update_sender) => {}
        rejection = send_rack_configurations(&controller_state, session, &update_sender) =>
        if let Some(rejected) = rejection {
            tracing::warn!(
                event = "rack-rejected",
                rack = name,
                error = %rejected,
                "the controller ends the stream of the rack controller"
            );
            let _ = update_sender.send(Err(grpc_status_for_rejection(&rejected))).await;
        },
        _ = controller_state.wait_until_deposed() => {
            let _ = update_sender.send(Err(not_leading_status(None))).await;
        }
    }
    controller_state.lock_controller().disconnect_rack(session);
    tracing::info!(event = "rack-disconnected", rack = name, "the rack controller's stream has ended");
}

async fn register_rack(
    controller_state: &ControllerState,
    peer: &AuthenticatedPeer,
    messages: &mut Streaming<v1::RackMessage>,
) -> Result<(String, u64), Status> {
    let first_message = tokio::time::timeout(coreward_listener::STREAM_REGISTRATION_TIMEOUT, messages.message()).await;
    let message = first_message.map_err(|_| Status::deadline_exceeded("no registration received"))??;
    let Some(registration) = message.and_then(|message| message.registration) else {
        return Err(Status::invalid_argument("a rack's first message: expected a registration"));
    };
    let (name, version) = (sanitize_string(registration.name), sanitize_string(registration.version));
    peer.require_role_and_name(FleetRole::Rack, &name)?;
    let now = controller_state.now();
    let session = controller_state.lock_controller().register_rack(&name, &version, now);
    session.map(|session| (name, session)).map_err(|rejection| grpc_status_for_rejection(&rejection))
}

/// Processes the rack's summaries and the messages of its agents until the rack disconnects.
async fn process_rack_messages(
    controller_state: &Arc<ControllerState>,
    name: &str,
    session: u64,
    messages: &mut Streaming<v1::RackMessage>,
    update_sender: &RackUpdateSender,
) {
    let mut rack_agents = RackAgents {
        controller_state,
        rack_name: name,
        rack_session_number: session,
        update_sender,
        message_senders: HashMap::new(),
    };
    let mut last_logged_rejection = None;
    while let Ok(Some(message)) = messages.message().await {
        let now = controller_state.now();
        controller_state.lock_controller().record_rack_message(session, now);
        for agent_message in message.agents {
            if let Err(status) = rack_agents.relay_message(agent_message).await {
                let _ = update_sender.send(Err(status)).await;
                return;
            }
        }
        if message.summaries.is_empty() {
            continue;
        }
        let outcome = controller_state.lock_controller().record_rack_summaries(session, &message.summaries, now);
        controller_state.on_loads_updated();
        // A repeated rejection is logged once and not ten times a second.
        if let Err(rejection) = &outcome
            && last_logged_rejection.as_ref() != Some(rejection)
        {
            tracing::warn!(
                event = "summary-rejected",
                rack = name,
                error = %rejection,
                "the controller rejects a load summary of the rack controller: repetitions of the error are not logged"
            );
        }
        last_logged_rejection = outcome.err();
    }
}

/// Agents behind one rack, each of which is served by its own task.
struct RackAgents<'a> {
    controller_state: &'a Arc<ControllerState>,
    rack_name: &'a str,
    rack_session_number: u64,
    update_sender: &'a RackUpdateSender,
    /// Queue to each agent's task, by the number of the agent's stream.
    message_senders: HashMap<u64, AgentMessageSender>,
}

impl RackAgents<'_> {
    /// Passes an agent's message to the agent's task, and starts the task if it does not run. Ends the task if there is
    /// no message.
    /// Fails if the rack has too many agents.
    async fn relay_message(&mut self, v1::FromAgent { stream, message }: v1::FromAgent) -> Result<(), Status> {
        let Some(message) = message else {
            self.message_senders.remove(&stream);
            return Ok(());
        };
        if !self.has_room_for(stream) {
            self.message_senders.retain(|_, sender| !sender.is_closed());
        }
        if !self.has_room_for(stream) {
            return Err(too_many_agents_status(self.rack_name, stream));
        }
        let relay = RackRelay {
            rack_session: self.rack_session_number,
            rack_name: self.rack_name.into(),
            stream_number: stream,
        };
        let (controller_state, updates) = (self.controller_state, self.update_sender);
        let agent_sender = self
            .message_senders
            .entry(stream)
            .or_insert_with(|| start_agent_stream(controller_state, relay, updates.clone()));
        // If the agent's task has ended, the rack already has the reason.
        let _ = agent_sender.send(Ok(message)).await;
        Ok(())
    }

    fn has_room_for(&self, stream_number: u64) -> bool {
        self.message_senders.len() < MAX_AGENTS_PER_RACK || self.message_senders.contains_key(&stream_number)
    }
}

fn too_many_agents_status(rack: &str, stream: u64) -> Status {
    let error = format!("stream {stream} of an agent is one more than {MAX_AGENTS_PER_RACK}: expected fewer");
    tracing::warn!(
        event = "rack-rejected",
        rack,
        error,
        "the controller ends the stream of the rack controller, which has too many agents"
    );
    Status::resource_exhausted(error)
}

fn start_agent_stream(
    controller_state: &Arc<ControllerState>,
    relay: RackRelay,
    update_sender: RackUpdateSender,
) -> AgentMessageSender {
    let (message_sender, messages) = mpsc::channel(MAX_QUEUED_AGENT_MESSAGES);
    let (agent_updates, mut update_receiver) = mpsc::channel(1);
    let stream = relay.stream_number;
    tokio::spawn(agents::serve_agent(
        controller_state.clone(),
        AgentReportSource::Rack(relay),
        ReceiverStream::new(messages),
        agent_updates,
    ));
    tokio::spawn(async move {
        let to_rack_update = |agent| Ok(v1::RackUpdate { update: Some(v1::rack_update::Update::Agent(agent)) });
        let empty_envelope = v1::ToAgent { stream, ..Default::default() };
        while let Some(answer) = update_receiver.recv().await {
            let agent_update = match answer {
                Ok(answer) => v1::ToAgent { update: Some(answer), ..empty_envelope.clone() },
                Err(status) => v1::ToAgent {
                    code: status.code() as i32,
                    message: status.message().into(),
                    ..empty_envelope.clone()
                },
            };
            if update_sender.send(to_rack_update(agent_update)).await.is_err() {
                return;
            }
        }
    });
    message_sender
}

/// Checks once per report interval whether the rack's configuration has changed, and then sends it. Returns `None` when
/// the rack disconnects, or the reason why the rack's stream must end.
async fn send_rack_configurations(
    controller_state: &ControllerState,
    session: u64,
    update_sender: &RackUpdateSender,
) -> Option<MessageRejection> {
    let (mut sent_configuration, mut checked_version) = (None, None);
    loop {
        let now = controller_state.now();
        let current_version = controller_state.lock_controller().rack_config_version(session);
        if checked_version.replace(current_version) != Some(current_version) {
            let configuration = match controller_state.lock_controller().rack_configuration(session, now) {
                Ok(configuration) => configuration?,
                Err(rejection) => return Some(rejection),
            };
            if sent_configuration.as_ref() != Some(&configuration) {
                let update = v1::rack_update::Update::Configuration((&configuration).into());
                if !controller_state.is_leading()
                    || update_sender.send(Ok(v1::RackUpdate { update: Some(update) })).await.is_err()
                {
                    return None;
                }
                sent_configuration = Some(configuration);
            }
        }
        let interval = controller_state.lock_controller().fleet().report_interval;
        tokio::time::sleep(interval).await;
    }
}
