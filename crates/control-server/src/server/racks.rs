//! Stream of one rack. The rack sends a registration, then summaries and its agents' messages. The controller sends
//! configurations of the rack and updates for its agents. Each agent behind a rack is served like a direct one
//! ([`super::agents`]).

use std::collections::HashMap;
use std::sync::Arc;

use coreward_tls::Role;
use coreward_wire::sanitize::sanitize;
use coreward_wire::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use super::agents::ReportSource;
use super::controller_state::ControllerState;
use super::leader_election::not_leading_status;
use super::{agents, rejection_status};
use coreward_controller::racks::RackRelay;
use coreward_controller::rejection::Rejection;
use coreward_listener::security::AuthenticatedPeer;

type UpdateSender = mpsc::Sender<Result<v1::RackUpdate, Status>>;
/// Sender of the queue through which an agent's messages reach its task.
type AgentMessageSender = mpsc::Sender<Result<v1::AgentMessage, Status>>;

/// Maximum number of one agent's messages that wait in its queue. If the queue is full, the rack's stream waits.
const MAX_QUEUED_MESSAGES: usize = 4;
/// Maximum number of agents' streams through one rack, which is the number of server ids.
const MAX_AGENTS: usize = 16_384;

pub async fn serve(
    shared: Arc<ControllerState>,
    peer: AuthenticatedPeer,
    mut messages: Streaming<v1::RackMessage>,
    updates: UpdateSender,
) {
    let (name, session) = match register(&shared, &peer, &mut messages).await {
        Ok(introduced) => introduced,
        Err(status) => {
            tracing::warn!(
                event = "rack-rejected",
                peer = %peer.caller,
                error = status.message(),
                "the controller rejects the registration of a rack controller"
            );
            let _ = updates.send(Err(status)).await;
            return;
        }
    };
    tracing::info!(event = "rack-connected", rack = name, peer = %peer.caller, "the rack controller has registered");
    tokio::select! {
        () = receive_messages(&shared, &name, session, &mut messages, &updates) => {}
        refused = send_updates(&shared, session, &updates) => if let Some(refused) = refused {
            tracing::warn!(
                event = "rack-rejected",
                rack = name,
                error = %refused,
                "the controller ends the stream of the rack controller"
            );
            let _ = updates.send(Err(rejection_status(&refused))).await;
        },
        _ = shared.wait_until_deposed() => {
            let _ = updates.send(Err(not_leading_status(None))).await;
        }
    }
    shared.controller().disconnect_rack(session);
    tracing::info!(event = "rack-disconnected", rack = name, "the rack controller's stream has ended");
}

async fn register(
    shared: &ControllerState,
    peer: &AuthenticatedPeer,
    messages: &mut Streaming<v1::RackMessage>,
) -> Result<(String, u64), Status> {
    let first = tokio::time::timeout(coreward_listener::REGISTRATION_TIMEOUT, messages.message()).await;
    let message = first.map_err(|_| Status::deadline_exceeded("no registration received"))??;
    let Some(registration) = message.and_then(|message| message.registration) else {
        return Err(Status::invalid_argument("a rack's first message: expected a registration"));
    };
    let (name, version) = (sanitize(registration.name), sanitize(registration.version));
    peer.require_name(Role::Rack, &name)?;
    let now = shared.now();
    let session = shared.controller().register_rack(&name, &version, now);
    session.map(|session| (name, session)).map_err(|refused| rejection_status(&refused))
}

/// Processes the rack's summaries and the messages of its agents until the rack disconnects.
async fn receive_messages(
    shared: &Arc<ControllerState>,
    name: &str,
    session: u64,
    messages: &mut Streaming<v1::RackMessage>,
    updates: &UpdateSender,
) {
    let mut served: HashMap<u64, AgentMessageSender> = HashMap::new();
    let mut newest_refusal = None;
    while let Ok(Some(message)) = messages.message().await {
        let now = shared.now();
        shared.controller().record_rack_message(session, now);
        for v1::FromAgent { stream, message } in message.agents {
            match message {
                None => drop(served.remove(&stream)),
                Some(message) => {
                    if served.len() >= MAX_AGENTS && !served.contains_key(&stream) {
                        served.retain(|_, printed| !printed.is_closed());
                    }
                    if served.len() >= MAX_AGENTS && !served.contains_key(&stream) {
                        let _ = updates.send(Err(too_many_agents_status(name, stream))).await;
                        return;
                    }
                    let relay = RackRelay { rack_session: session, name: name.into(), stream };
                    let agent = served.entry(stream).or_insert_with(|| start(shared, relay, updates.clone()));
                    // If the agent's task has ended, the rack already has the reason.
                    let _ = agent.send(Ok(message)).await;
                }
            }
        }
        if message.summaries.is_empty() {
            continue;
        }
        let outcome = shared.controller().record_rack_summaries(session, &message.summaries, now);
        shared.on_loads_updated();
        // A repeated rejection is logged once and not ten times a second.
        if let Err(refused) = &outcome
            && newest_refusal.as_ref() != Some(refused)
        {
            tracing::warn!(
                event = "summary-rejected",
                rack = name,
                error = %refused,
                "the controller rejects a load summary of the rack controller and logs each error once"
            );
        }
        newest_refusal = outcome.err();
    }
}

fn too_many_agents_status(rack: &str, stream: u64) -> Status {
    let error = format!("stream {stream} of an agent is one more than {MAX_AGENTS}: expected fewer");
    tracing::warn!(
        event = "rack-rejected",
        rack,
        error,
        "the controller ends the stream of the rack controller, which has too many agents"
    );
    Status::resource_exhausted(error)
}

fn start(shared: &Arc<ControllerState>, relay: RackRelay, updates: UpdateSender) -> AgentMessageSender {
    let (printed, messages) = mpsc::channel(MAX_QUEUED_MESSAGES);
    let (answers, mut to_agent) = mpsc::channel(1);
    let stream = relay.stream;
    tokio::spawn(agents::serve(shared.clone(), ReportSource::Rack(relay), ReceiverStream::new(messages), answers));
    tokio::spawn(async move {
        let update = |agent| Ok(v1::RackUpdate { update: Some(v1::rack_update::Update::Agent(agent)) });
        let to = v1::ToAgent { stream, ..Default::default() };
        while let Some(answer) = to_agent.recv().await {
            let agent = match answer {
                Ok(answer) => v1::ToAgent { update: Some(answer), ..to.clone() },
                Err(status) => {
                    v1::ToAgent { code: status.code() as i32, message: status.message().into(), ..to.clone() }
                }
            };
            if updates.send(update(agent)).await.is_err() {
                return;
            }
        }
    });
    printed
}

/// Sends the rack's configuration after each change, checked once per report interval. Ends when the rack disconnects,
/// or returns the reason to end its stream.
async fn send_updates(shared: &ControllerState, session: u64, updates: &UpdateSender) -> Option<Rejection> {
    let (mut reported, mut considered) = (None, None);
    loop {
        let now = shared.now();
        let changes = shared.controller().rack_config_version(session);
        if considered.replace(changes) != Some(changes) {
            let configuration = match shared.controller().rack_configuration(session, now) {
                Ok(configuration) => configuration?,
                Err(refused) => return Some(refused),
            };
            if reported.as_ref() != Some(&configuration) {
                let update = v1::rack_update::Update::Configuration((&configuration).into());
                if !shared.is_leading() || updates.send(Ok(v1::RackUpdate { update: Some(update) })).await.is_err() {
                    return None;
                }
                reported = Some(configuration);
            }
        }
        let interval = shared.controller().fleet().report_interval;
        tokio::time::sleep(interval).await;
    }
}
