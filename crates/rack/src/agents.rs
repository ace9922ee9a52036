//! The gRPC service for agents, which is the part of the controller's service that agents use.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coreward_controller::ClockReadings;
use coreward_fleet::clock::wall_clock_time;
use coreward_listener::STREAM_REGISTRATION_TIMEOUT;
use coreward_listener::security::{AuthenticatedPeer, ListenerSecurity};
use coreward_rpc::v1::control_server::Control;
use coreward_tls::FleetRole;
use coreward_wire::rack::pack_into_rack_messages;
use coreward_wire::sanitize::sanitize_str;
use coreward_wire::v1;
use coreward_wire::v1::agent_message::Message;
use coreward_wire::v1::agent_update::Update;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::codegen::BoxStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::reducer::ReportReducer;

/// Maximum number of updates that wait for one agent. An agent that does not read its updates is disconnected at this
/// limit.
const AGENT_UPDATE_QUEUE_LENGTH: usize = 64;
/// Maximum number of reports that wait for the controller, per connected agent on average. An agent whose report would
/// exceed the total must reconnect, because a dropped report may have contained its RSS configuration.
const MAX_WAITING_REPORTS_PER_AGENT: usize = 16;

type AgentUpdateSender = mpsc::Sender<Result<v1::AgentUpdate, Status>>;

/// State that the controller's connection shares with the agents' streams.
pub struct SharedRackState {
    /// Connection to the controller, or `None` if no controller is connected.
    controller_session: Mutex<Option<ControllerSession>>,
    /// Number of the newest agent stream. Numbers are never reused, because the next controller may still serve a
    /// stream with an old number.
    newest_stream_number: AtomicU64,
    start_time: Instant,
}

/// Connection to the controller, with the agents' streams that are relayed through it.
struct ControllerSession {
    message_sender: mpsc::Sender<v1::RackMessage>,
    update_senders_by_stream: HashMap<u64, AgentUpdateSender>,
    /// Number of each agent's unanswered socket queries, by the number of its stream.
    unanswered_query_count_by_stream: HashMap<u64, u32>,
    reducer: ReportReducer,
    /// Reports that will be sent together with the next summaries.
    pending_reports: Vec<v1::FromAgent>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RackConnectionStatus {
    pub is_controller_connected: bool,
    pub agent_count: usize,
}

impl Default for SharedRackState {
    fn default() -> Self {
        Self {
            controller_session: Mutex::new(None),
            newest_stream_number: AtomicU64::new(0),
            start_time: Instant::now(),
        }
    }
}

impl SharedRackState {
    fn now(&self) -> ClockReadings {
        let wall = wall_clock_time();
        // A rack stores no records, so their clock is not needed.
        ClockReadings { monotonic_time: self.start_time.elapsed(), wall_time: wall, record_clock_time: wall }
    }

    /// Locks the connection to the controller. The lock is held for microseconds, and never across an await.
    fn lock_controller_session(&self) -> MutexGuard<'_, Option<ControllerSession>> {
        self.controller_session.lock()
    }

    pub fn rack_connection_status(&self) -> RackConnectionStatus {
        let session = self.lock_controller_session();
        RackConnectionStatus {
            is_controller_connected: session.is_some(),
            agent_count: session.as_ref().map_or(0, |connection| connection.reducer.agent_count()),
        }
    }

    /// Stores a new connection to the controller, so that agents are accepted from now on.
    pub fn on_controller_connected(&self, message_sender: mpsc::Sender<v1::RackMessage>, reducer: ReportReducer) {
        let (update_senders_by_stream, open_query_counts, pending_reports) =
            (HashMap::new(), HashMap::new(), Vec::new());
        *self.lock_controller_session() = Some(ControllerSession {
            message_sender,
            update_senders_by_stream,
            unanswered_query_count_by_stream: open_query_counts,
            reducer,
            pending_reports,
        });
    }

    /// Drops the controller's connection and ends all agents' streams, so that agents try their next address.
    pub fn on_controller_disconnected(&self) {
        *self.lock_controller_session() = None;
    }

    /// Applies an update from the controller, which is for an agent or changes the rack's configuration.
    pub fn apply_update(&self, update: v1::RackUpdate) -> anyhow::Result<()> {
        let mut session = self.lock_controller_session();
        let Some(connection) = session.as_mut() else { return Ok(()) };
        match update.update {
            Some(v1::rack_update::Update::Configuration(configuration)) => {
                connection.reducer.apply_configuration((&configuration).try_into()?);
            }
            Some(v1::rack_update::Update::Agent(to_agent)) => connection.send_update_to_agent(to_agent),
            None => tracing::warn!(
                event = "update-unknown",
                "the controller has sent an update of an unknown kind, which is ignored: upgrade the rack controller"
            ),
        }
        Ok(())
    }

    /// Returns the interval at which summaries are sent, or `None` before the first configuration.
    pub fn report_interval(&self) -> Option<Duration> {
        self.lock_controller_session().as_ref()?.reducer.report_interval()
    }

    /// Takes the summaries and reports that are due, and returns them as messages to the controller.
    pub fn take_summary_messages(&self) -> Vec<v1::RackMessage> {
        let (now, mut connection) = (self.now(), self.lock_controller_session());
        let Some(connection) = connection.as_mut() else { return Vec::new() };
        let due_summaries = connection.reducer.compute_summaries(now);
        pack_into_rack_messages(std::mem::take(&mut connection.pending_reports), due_summaries)
    }

    /// Registers an agent's stream. Returns the stream's number, and the sender for messages to the controller.
    fn begin_stream(&self, update_sender: AgentUpdateSender) -> Result<(u64, mpsc::Sender<v1::RackMessage>), Status> {
        let mut session = self.lock_controller_session();
        let no_controller_status = || Status::unavailable("this rack has no connection to its controller");
        let connection = session.as_mut().ok_or_else(no_controller_status)?;
        let stream_number = self.newest_stream_number.fetch_add(1, Ordering::Relaxed) + 1;
        connection.update_senders_by_stream.insert(stream_number, update_sender);
        connection.reducer.begin_stream(stream_number);
        Ok((stream_number, connection.message_sender.clone()))
    }

    fn end_stream(&self, stream: u64) {
        if let Some(connection) = self.lock_controller_session().as_mut() {
            connection.forget_stream(stream);
            connection.pending_reports.retain(|pending_report| pending_report.stream != stream);
        }
    }

    /// Returns whether the agent's certificate permits reports for `server`. If it does not, sends the agent an error.
    fn may_report_for_server(&self, stream: u64, peer: &AuthenticatedPeer, server: &str) -> bool {
        let Err(rejection) = peer.require_role_and_name(FleetRole::Agent, server) else { return true };
        tracing::warn!(
            event = "agent-rejected",
            server,
            peer = %peer.caller,
            error = rejection.message(),
            "the rack controller rejects an agent that may not report for this server"
        );
        if let Some(update_sender) = self
            .lock_controller_session()
            .as_ref()
            .and_then(|connection| connection.update_senders_by_stream.get(&stream))
        {
            let _ = update_sender.try_send(Err(rejection));
        }
        false
    }

    /// Returns the time until the stream's next message may be read. Zero means that it may be read now.
    fn time_until_next_message(&self, stream: u64) -> Duration {
        let now = self.now();
        self.lock_controller_session()
            .as_ref()
            .map_or(Duration::ZERO, |connection| connection.reducer.time_until_next_message(stream, now))
    }

    /// Counts an agent's message against the rate limit for reports, unless it answers a query.
    fn count_message_against_rate_limit(&self, stream: u64, message: &Message) {
        let (now, mut connection) = (self.now(), self.lock_controller_session());
        let Some(connection) = connection.as_mut() else { return };
        match connection
            .unanswered_query_count_by_stream
            .get_mut(&stream)
            .filter(|_| matches!(message, Message::SocketAnswer(_)))
        {
            Some(open_query_count) if *open_query_count > 0 => *open_query_count -= 1,
            _ => connection.reducer.count_unsolicited_message(stream, now),
        }
    }

    fn process_report(&self, stream: u64, report: v1::Report) -> bool {
        let (now, mut connection) = (self.now(), self.lock_controller_session());
        let Some(connection) =
            connection.as_mut().filter(|connection| connection.update_senders_by_stream.contains_key(&stream))
        else {
            return false;
        };
        let (forwarded_to_previous, outcome) = connection.reducer.record_report(stream, report, now);
        if let Err(rejection) = outcome {
            tracing::debug!(
                event = "report-rejected",
                stream,
                reason = rejection.counter_name(),
                error = %rejection,
                "the rack controller rejects a report of an agent"
            );
        }
        let Some(report) = forwarded_to_previous else { return true };
        let has_room = connection.pending_reports.len()
            < MAX_WAITING_REPORTS_PER_AGENT * connection.update_senders_by_stream.len();
        if has_room {
            connection.pending_reports.push(wrap_agent_message(stream, Message::Report(report)));
        }
        has_room
    }
}

impl ControllerSession {
    fn send_update_to_agent(&mut self, to_agent: v1::ToAgent) {
        let v1::ToAgent { stream, update, code, message } = to_agent;
        let Some(update_sender) = self.update_senders_by_stream.get(&stream) else { return };
        let is_stream_end = update.is_none();
        if matches!(update.as_ref().and_then(|update| update.update.as_ref()), Some(Update::SocketQuery(_))) {
            *self.unanswered_query_count_by_stream.entry(stream).or_default() += 1;
        }
        let send_result = update_sender.try_send(update.ok_or_else(|| Status::new(Code::from_i32(code), message)));
        if is_stream_end || send_result.is_err() {
            self.forget_stream(stream);
        }
    }

    fn forget_stream(&mut self, stream: u64) {
        self.update_senders_by_stream.remove(&stream);
        self.unanswered_query_count_by_stream.remove(&stream);
        self.reducer.end_stream(stream);
    }
}

fn wrap_agent_message(stream: u64, message: Message) -> v1::FromAgent {
    v1::FromAgent { stream, message: Some(v1::AgentMessage { message: Some(message) }) }
}

/// Returns the agent's next message. Reads none while the agent exceeds its rate limit, so that HTTP/2's flow control
/// slows the agent.
async fn read_next_message(
    rack_state: &SharedRackState,
    stream: u64,
    agent_messages: &mut Streaming<v1::AgentMessage>,
) -> Result<Option<v1::AgentMessage>, Status> {
    loop {
        let message_delay = rack_state.time_until_next_message(stream);
        if message_delay.is_zero() {
            return agent_messages.message().await;
        }
        tokio::time::sleep(message_delay).await;
    }
}

async fn serve_agent(
    rack_state: Arc<SharedRackState>,
    peer: AuthenticatedPeer,
    stream: u64,
    mut agent_messages: Streaming<v1::AgentMessage>,
    message_sender: mpsc::Sender<v1::RackMessage>,
) {
    let (deadline, mut has_spoken) = (Instant::now() + STREAM_REGISTRATION_TIMEOUT, false);
    let forward_to_controller = async |agent_message| {
        message_sender.send(v1::RackMessage { agents: vec![agent_message], ..Default::default() }).await.is_ok()
    };
    loop {
        let message = tokio::select! {
            message = read_next_message(&rack_state, stream, &mut agent_messages) => message,
            () = message_sender.closed() => break,
            () = tokio::time::sleep_until(deadline), if !has_spoken => break,
        };
        has_spoken = true;
        let Ok(Some(v1::AgentMessage { message: Some(message) })) = message else { break };
        let is_stream_open = match message {
            Message::Report(report) => rack_state.process_report(stream, report),
            // The controller knows the agent's server only from this message, so the certificate must match it.
            Message::Registration(registration)
                if !rack_state.may_report_for_server(stream, &peer, &sanitize_str(&registration.server)) =>
            {
                false
            }
            other => {
                rack_state.count_message_against_rate_limit(stream, &other);
                forward_to_controller(wrap_agent_message(stream, other)).await
            }
        };
        if !is_stream_open {
            break;
        }
    }
    rack_state.end_stream(stream);
    forward_to_controller(v1::FromAgent { stream, message: None }).await;
}

pub struct RackGrpcService {
    pub rack_state: Arc<SharedRackState>,
    /// Security settings of the agents' listener, such as the certificates that agents may use to authenticate
    /// themselves.
    pub security: Arc<ListenerSecurity>,
}

fn only_agents_accepted_status() -> Status {
    Status::unimplemented("this is a rack: expected an agent here, and everybody else at the controller")
}

#[tonic::async_trait]
impl Control for RackGrpcService {
    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<BoxStream<v1::AgentUpdate>>, Status> {
        let peer = AuthenticatedPeer::from_request(&request, &self.security)?;
        let (update_sender, update_receiver) = mpsc::channel(AGENT_UPDATE_QUEUE_LENGTH);
        let (stream, message_sender) = self.rack_state.begin_stream(update_sender)?;
        tokio::spawn(serve_agent(self.rack_state.clone(), peer, stream, request.into_inner(), message_sender));
        Ok(Response::new(Box::pin(ReceiverStream::new(update_receiver))))
    }

    async fn load_balancer(
        &self,
        _request: Request<Streaming<v1::LoadBalancerMessage>>,
    ) -> Result<Response<BoxStream<v1::DataplaneUpdate>>, Status> {
        Err(only_agents_accepted_status())
    }

    async fn rack(
        &self,
        _request: Request<Streaming<v1::RackMessage>>,
    ) -> Result<Response<BoxStream<v1::RackUpdate>>, Status> {
        Err(only_agents_accepted_status())
    }

    async fn fleet(&self, _request: Request<v1::FleetRequest>) -> Result<Response<v1::FleetReply>, Status> {
        Err(only_agents_accepted_status())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn queue_for_a_stalled_controller_is_bounded() {
        let rack_state = SharedRackState::default();
        let (messages, _controller) = mpsc::channel(1);
        rack_state.on_controller_connected(messages, ReportReducer::new(Duration::from_secs(1), 8));
        let (update_sender, _agent) = mpsc::channel(1);
        let (stream, _) = rack_state.begin_stream(update_sender).unwrap();
        // Without a configuration, every report is forwarded completely.
        let accepted_report_count =
            (0..1000).filter(|_| rack_state.process_report(stream, v1::Report::default())).count();
        assert_eq!(accepted_report_count, MAX_WAITING_REPORTS_PER_AGENT);
        assert_eq!(rack_state.take_summary_messages()[0].agents.len(), MAX_WAITING_REPORTS_PER_AGENT);
        assert!(rack_state.process_report(stream, v1::Report::default()));
    }

    #[test]
    fn streams_of_an_old_controller_are_not_relayed_to_the_next() {
        let rack_state = SharedRackState::default();
        let mut stream_numbers = [0, 0];
        for stream in &mut stream_numbers {
            let (messages, _controller) = mpsc::channel(1);
            rack_state.on_controller_connected(messages, ReportReducer::new(Duration::from_secs(1), 8));
            let (update_sender, _agent) = mpsc::channel(1);
            (*stream, _) = rack_state.begin_stream(update_sender).unwrap();
        }
        assert!(!rack_state.process_report(stream_numbers[0], v1::Report::default()));
        rack_state.end_stream(stream_numbers[0]);
        assert!(rack_state.process_report(stream_numbers[1], v1::Report::default()));
    }
}
