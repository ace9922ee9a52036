//! Stream of one load balancer. The load balancer sends a registration, then its state. The controller sends
//! configurations, tables and agents' answers.

use std::fmt::Display;
use std::net::IpAddr;
use std::sync::Arc;

use coreward_rpc::invalid_argument_status;
use coreward_tls::FleetRole;
use coreward_wire::address::parse_optional_address;
use coreward_wire::sanitize::sanitize_string;
use coreward_wire::{HealthCheckResultsMessage, ServiceIndex, SocketAnswer, SocketQuery, TrafficCountsMessage, v1};
use tokio::sync::mpsc;
use tonic::{Status, Streaming};

use super::controller_state::ControllerState;
use super::leader_election::not_leading_status;
use super::rejection_status::grpc_status_for_rejection;
use super::state_manager::FleetRecordChange;
use super::update_publisher::{EncodedConfigUpdate, PendingSessionUpdates, SentUpdateCursor};
use coreward_listener::security::AuthenticatedPeer;

type DataplaneUpdateSender = mpsc::Sender<Result<v1::DataplaneUpdate, Status>>;

pub async fn serve_load_balancer(
    controller_state: Arc<ControllerState>,
    peer: AuthenticatedPeer,
    mut messages: Streaming<v1::LoadBalancerMessage>,
    update_sender: DataplaneUpdateSender,
) {
    let (name, session) = match register_load_balancer(&controller_state, &peer, &mut messages).await {
        Ok(name_and_session) => name_and_session,
        Err(status) => {
            tracing::warn!(
                event = "load-balancer-rejected",
                peer = %peer.caller,
                error = status.message(),
                "the controller rejects the registration of a load balancer"
            );
            let _ = update_sender.send(Err(status)).await;
            return;
        }
    };
    tracing::info!(
        event = "load-balancer-connected",
        load_balancer = name,
        peer = %peer.caller,
        "the load balancer has registered with the controller"
    );
    let answers = controller_state.socket_query_relay.register_load_balancer_session(session);
    tokio::select! {
        () = process_load_balancer_messages(&controller_state, &name, session, &mut messages) => {}
        () = send_load_balancer_updates(&controller_state, SentUpdateCursor::default(), answers, &update_sender) => {}
        _ = controller_state.wait_until_deposed() => {
            let _ = update_sender.send(Err(not_leading_status(None))).await;
        }
    }
    controller_state.socket_query_relay.forget_load_balancer_session(session);
    controller_state.lock_controller().table_acks.forget_session(session);
    end_load_balancer_session(&controller_state, name, session).await;
}

async fn end_load_balancer_session(controller_state: &ControllerState, name: String, session: u64) {
    let now = controller_state.now();
    if controller_state.lock_controller().load_balancers.end_session(session, now) {
        tracing::info!(
            event = "load-balancer-disconnected",
            load_balancer = name,
            "the stream of the load balancer to the controller has ended"
        );
        if let Err(error) = controller_state
            .request_change_by_controller(FleetRecordChange::RecordLoadBalancerDisconnect { name: name.clone() })
            .await
        {
            tracing::warn!(
                event = "departure-not-stored",
                load_balancer = name,
                error = format!("{error:#}"),
                "the controller cannot store that the load balancer has disconnected: it keeps the load balancer on \
                 record longer than necessary"
            );
        }
    }
}

/// Registers the load balancer, and returns its name and session. The other load balancers then receive its address and
/// the number that identifies it in cookies.
async fn register_load_balancer(
    controller_state: &ControllerState,
    peer: &AuthenticatedPeer,
    messages: &mut Streaming<v1::LoadBalancerMessage>,
) -> Result<(String, u64), Status> {
    let LoadBalancerRegistration { load_balancer_name: name, address, generation_in_force } =
        read_load_balancer_registration(messages).await?;
    peer.require_role_and_name(FleetRole::Lb, &name)?;
    let now = controller_state.now();
    let session = controller_state
        .lock_controller()
        .register_load_balancer(&name, now)
        .map_err(|rejection| grpc_status_for_rejection(&rejection))?;
    controller_state.lock_controller().record_active_configuration(session, generation_in_force);
    if let Err(error) = controller_state
        .request_change_by_controller(FleetRecordChange::RegisterLoadBalancer { name: name.clone(), address })
        .await
    {
        end_load_balancer_session(controller_state, name, session).await;
        return Err(Status::unavailable(format!("{error:#}")));
    }
    Ok((name, session))
}

struct LoadBalancerRegistration {
    load_balancer_name: String,
    address: Option<IpAddr>,
    /// Generation of the configuration that is active at the load balancer.
    generation_in_force: u64,
}

async fn read_load_balancer_registration(
    messages: &mut Streaming<v1::LoadBalancerMessage>,
) -> Result<LoadBalancerRegistration, Status> {
    let first_message = tokio::time::timeout(coreward_listener::STREAM_REGISTRATION_TIMEOUT, messages.message()).await;
    let message = first_message
        .map_err(|_| Status::deadline_exceeded("no registration received"))??
        .and_then(|message| message.message);
    match message {
        Some(v1::load_balancer_message::Message::Registration(registration)) => {
            let address = parse_optional_address("address", &registration.address).map_err(invalid_argument_status)?;
            let generation_in_force = registration.configuration_generation;
            Ok(LoadBalancerRegistration {
                load_balancer_name: sanitize_string(registration.name),
                address,
                generation_in_force,
            })
        }
        _ => Err(Status::invalid_argument("a load balancer's first message: expected a registration")),
    }
}

/// Processes the load balancer's messages, such as its state and its socket queries, until it disconnects.
async fn process_load_balancer_messages(
    controller_state: &ControllerState,
    load_balancer: &str,
    session: u64,
    messages: &mut Streaming<v1::LoadBalancerMessage>,
) {
    while let Ok(Some(message)) = messages.message().await {
        if let Some(message) = message.message {
            process_load_balancer_message(controller_state, load_balancer, session, message);
        }
    }
}

fn process_load_balancer_message(
    controller_state: &ControllerState,
    load_balancer: &str,
    session: u64,
    message: v1::load_balancer_message::Message,
) {
    use v1::load_balancer_message::Message;
    let now = controller_state.now();
    match message {
        Message::State(state) => controller_state.lock_controller().record_load_balancer_state(session, state, now),
        Message::Traffic(traffic) => {
            let traffic = TrafficCountsMessage::try_from(&traffic);
            if let Some(traffic) = ok_or_log_invalid_message("traffic-rejected", load_balancer, traffic) {
                controller_state.lock_controller().record_load_balancer_traffic(session, &traffic, now);
                controller_state.on_table_inputs_changed();
            }
        }
        Message::Health(health) => {
            let health = HealthCheckResultsMessage::try_from(&health);
            if let Some(health) = ok_or_log_invalid_message("health-rejected", load_balancer, health) {
                controller_state.lock_controller().load_balancers.record_health_check_results(session, health, now);
                controller_state.poll_table_inputs();
            }
        }
        Message::SocketQuery(query) => {
            if let Some(query) =
                ok_or_log_invalid_message("query-rejected", load_balancer, SocketQuery::try_from(&query))
            {
                relay_socket_query(controller_state, session, query);
            }
        }
        Message::TableInForce(table) => {
            if let Some(service) = ServiceIndex::new(table.service_index) {
                controller_state.lock_controller().record_table_in_force(session, service, table.generation, now);
            }
        }
        Message::Registration(_) => {}
    }
}

/// Returns the decoded message of the load balancer, or `None` if the message is invalid. Logs an invalid message as
/// `event`.
fn ok_or_log_invalid_message<T>(event: &str, load_balancer: &str, decode_result: Result<T, impl Display>) -> Option<T> {
    let log_invalid_message = |error: &_| {
        tracing::warn!(
            event,
            load_balancer,
            %error,
            "the controller cannot decode a message of the load balancer and ignores the message"
        );
    };
    decode_result.inspect_err(log_invalid_message).ok()
}

/// Relays the query to the server's agent. If no agent is connected, the load balancer gets an answer at once.
fn relay_socket_query(state: &ControllerState, session: u64, query: SocketQuery) {
    let agent_session = state.lock_controller().live_agent_session_number(query.server);
    let query = SocketQuery { load_balancer_session: session, ..query };
    match agent_session {
        Some(agent) => state.socket_query_relay.relay_query(agent, query),
        None => state.socket_query_relay.send_answer(query.to_absent_agent_answer()),
    }
}

/// Sends the newest configuration and then the newest tables after each update. A slow receiver misses some tables.
async fn send_load_balancer_updates(
    controller_state: &ControllerState,
    mut cursor: SentUpdateCursor,
    mut answer_receiver: mpsc::Receiver<SocketAnswer>,
    update_sender: &DataplaneUpdateSender,
) {
    use v1::dataplane_update::Update;
    let send_update = async |update: Update| {
        controller_state.is_leading()
            && update_sender.send(Ok(v1::DataplaneUpdate { update: Some(update) })).await.is_ok()
    };
    let mut changes = controller_state.publisher.subscribe_to_update_number();
    changes.mark_changed();
    loop {
        tokio::select! {
            changed = changes.changed() => {
                if changed.is_err() {
                    return;
                }
                changes.mark_unchanged();
                // Without a document, for example after the loss of a disk, load balancers keep their configuration.
                if !controller_state.lock_controller().fleet().has_document() {
                    continue;
                }
                let pending_updates = controller_state.publisher.take_pending_updates(&mut cursor);
                for update in updates_in_sending_order(pending_updates) {
                    if !send_update(update).await {
                        return;
                    }
                }
            }
            Some(answer) = answer_receiver.recv() => {
                if !send_update(Update::SocketAnswer(answer.into())).await {
                    return;
                }
            }
        }
    }
}

/// Returns the updates in the order in which they must be sent.
fn updates_in_sending_order(
    pending_updates: PendingSessionUpdates,
) -> impl Iterator<Item = v1::dataplane_update::Update> {
    use v1::dataplane_update::Update;
    let configuration = pending_updates.configuration.into_iter().map(|update| match update {
        EncodedConfigUpdate::Full(configuration) => Update::Configuration(configuration),
        EncodedConfigUpdate::Change(change) => Update::Change(change),
    });
    configuration.chain(pending_updates.tables.into_iter().map(Update::Table))
}
