//! The side towards agents: the same gRPC as the controller's, as far as agents use it.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use coreward_controller::Now;
use coreward_fleet::clock::wall_now;
use coreward_listener::REGISTRATION_TIMEOUT;
use coreward_listener::security::{AuthenticatedPeer, Security};
use coreward_tls::Role;
use coreward_wire::rack::rack_messages;
use coreward_wire::sanitize::readable;
use coreward_wire::v1;
use coreward_wire::v1::agent_message::Message;
use coreward_wire::v1::agent_update::Update;
use coreward_wire::v1::control_server::Control;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::mpsc;
use tokio::time::Instant;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Request, Response, Status, Streaming};

use crate::reducer::Reducer;

/// Updates that wait for one agent: configurations and questions. One that does not read them is let go.
const QUEUED: usize = 64;
/// Reports of one agent, on average, that wait to be handed on while the controller does not read. One whose report finds no room
/// begins anew: a report that was left out may have been the one with its RSS.
const WAITING: usize = 16;

type Answers = mpsc::Sender<Result<v1::AgentUpdate, Status>>;

/// What the connection to the controller and those of agents share.
pub struct Shared {
    /// `None`: there is no controller.
    up: Mutex<Option<Up>>,
    /// The newest stream of an agent. A number is not used again at the next controller, where somebody may still be served who came
    /// before.
    streams: AtomicU64,
    started: Instant,
}

/// A connection to the controller.
struct Up {
    /// To the controller.
    messages: mpsc::Sender<v1::RackMessage>,
    answers: HashMap<u64, Answers>,
    /// Questions that an agent has not answered, by its stream.
    asked: HashMap<u64, u32>,
    reducer: Reducer,
    /// Reports that go up with the next summaries.
    handed_on: Vec<v1::FromAgent>,
}

/// What the rack counts, for Prometheus.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Counts {
    /// Whether there is a controller.
    pub connected: bool,
    /// Agents that are connected.
    pub agents: usize,
}

impl Default for Shared {
    fn default() -> Self {
        Self { up: Mutex::new(None), streams: AtomicU64::new(0), started: Instant::now() }
    }
}

impl Shared {
    /// The moment.
    fn now(&self) -> Now {
        let wall = wall_now();
        // A rack keeps no records: nothing here is dated by their clock.
        Now { monotonic: self.started.elapsed(), wall, record: wall }
    }

    /// Held for microseconds; never across an await.
    fn up(&self) -> MutexGuard<'_, Option<Up>> {
        self.up.lock()
    }

    /// What is counted now.
    pub fn counts(&self) -> Counts {
        let up = self.up();
        Counts { connected: up.is_some(), agents: up.as_ref().map_or(0, |up| up.reducer.agent_count()) }
    }

    /// There is a controller: agents are taken from now on.
    pub fn connected(&self, messages: mpsc::Sender<v1::RackMessage>, reducer: Reducer) {
        let (answers, asked, handed_on) = (HashMap::new(), HashMap::new(), Vec::new());
        *self.up() = Some(Up { messages, answers, asked, reducer, handed_on });
    }

    /// There is none any more: the streams of all agents end, and they look elsewhere.
    pub fn disconnected(&self) {
        *self.up() = None;
    }

    /// The controller says something.
    pub fn update(&self, update: v1::RackUpdate) -> anyhow::Result<()> {
        let mut up = self.up();
        let Some(up) = up.as_mut() else { return Ok(()) };
        match update.update {
            Some(v1::rack_update::Update::Configuration(configuration)) => {
                up.reducer.configure((&configuration).try_into()?);
            }
            Some(v1::rack_update::Update::Agent(to_agent)) => up.tell(to_agent),
            None => tracing::error!("the controller's update is of a kind that this version does not know"),
        }
        Ok(())
    }

    /// Time between two summaries; `None`: none is asked for yet.
    pub fn report_interval(&self) -> Option<Duration> {
        self.up().as_ref()?.reducer.report_interval()
    }

    /// What goes up now, in as many messages as it takes.
    pub fn summaries(&self) -> Vec<v1::RackMessage> {
        let (now, mut up) = (self.now(), self.up());
        let Some(up) = up.as_mut() else { return Vec::new() };
        let summaries = up.reducer.summaries(now);
        rack_messages(std::mem::take(&mut up.handed_on), summaries)
    }

    /// An agent has connected: the number of its stream, and the way to the controller.
    fn begin(&self, answers: Answers) -> Result<(u64, mpsc::Sender<v1::RackMessage>), Status> {
        let mut up = self.up();
        let no_controller = || Status::unavailable("this rack has no connection to its controller");
        let up = up.as_mut().ok_or_else(no_controller)?;
        let stream = self.streams.fetch_add(1, Ordering::Relaxed) + 1;
        up.answers.insert(stream, answers);
        up.reducer.begin(stream);
        Ok((stream, up.messages.clone()))
    }

    /// An agent's stream is over.
    fn end(&self, stream: u64) {
        if let Some(up) = self.up().as_mut() {
            up.forget(stream);
            up.handed_on.retain(|from| from.stream != stream);
        }
    }

    /// Whether the agent is who its certificate says; it is told when not.
    fn may_speak_for(&self, stream: u64, peer: &AuthenticatedPeer, server: &str) -> bool {
        let Err(refused) = peer.require_name(Role::Agent, server) else { return true };
        tracing::warn!("the agent at {} was refused: {}", peer.caller, refused.message());
        if let Some(answers) = self.up().as_ref().and_then(|up| up.answers.get(&stream)) {
            let _ = answers.try_send(Err(refused));
        }
        false
    }

    /// Time until the stream's next message may be read; zero: now.
    fn message_wait(&self, stream: u64) -> Duration {
        let now = self.now();
        self.up().as_ref().map_or(Duration::ZERO, |up| up.reducer.message_wait(stream, now))
    }

    /// Counts what is no report: an answer to a question is free, all else counts like a report.
    fn other_message(&self, stream: u64, message: &Message) {
        let (now, mut up) = (self.now(), self.up());
        let Some(up) = up.as_mut() else { return };
        match up.asked.get_mut(&stream).filter(|_| matches!(message, Message::SocketAnswer(_))) {
            Some(asked) if *asked > 0 => *asked -= 1,
            _ => up.reducer.message_unasked(stream, now),
        }
    }

    /// Whether the stream goes on: it does not when the controller has ended it.
    fn report(&self, stream: u64, report: v1::Report) -> bool {
        let (now, mut up) = (self.now(), self.up());
        let Some(up) = up.as_mut().filter(|up| up.answers.contains_key(&stream)) else { return false };
        let (handed_on, outcome) = up.reducer.report(stream, report, now);
        if let Err(refused) = outcome {
            tracing::debug!("a report was refused ({}): {refused}", refused.reason());
        }
        let Some(report) = handed_on else { return true };
        let has_room = up.handed_on.len() < WAITING * up.answers.len();
        if has_room {
            up.handed_on.push(from_agent(stream, Message::Report(report)));
        }
        has_room
    }
}

impl Up {
    fn tell(&mut self, to_agent: v1::ToAgent) {
        let v1::ToAgent { stream, update, code, message } = to_agent;
        let Some(answers) = self.answers.get(&stream) else { return };
        let ends = update.is_none();
        if matches!(update.as_ref().and_then(|update| update.update.as_ref()), Some(Update::SocketQuery(_))) {
            *self.asked.entry(stream).or_default() += 1;
        }
        let told = answers.try_send(update.ok_or_else(|| Status::new(Code::from_i32(code), message)));
        if ends || told.is_err() {
            self.forget(stream);
        }
    }

    fn forget(&mut self, stream: u64) {
        self.answers.remove(&stream);
        self.asked.remove(&stream);
        self.reducer.end(stream);
    }
}

fn from_agent(stream: u64, message: Message) -> v1::FromAgent {
    v1::FromAgent { stream, message: Some(v1::AgentMessage { message: Some(message) }) }
}

/// Returns the next message; nothing is read or decoded while the agent is over its limit, so HTTP/2's flow control stops it.
async fn next_message(
    shared: &Shared,
    stream: u64,
    said: &mut Streaming<v1::AgentMessage>,
) -> Result<Option<v1::AgentMessage>, Status> {
    loop {
        let wait = shared.message_wait(stream);
        if wait.is_zero() {
            return said.message().await;
        }
        tokio::time::sleep(wait).await;
    }
}

/// Serves one agent until it, or the controller, goes.
async fn serve(
    shared: Arc<Shared>,
    peer: AuthenticatedPeer,
    stream: u64,
    mut said: Streaming<v1::AgentMessage>,
    up: mpsc::Sender<v1::RackMessage>,
) {
    let (deadline, mut has_spoken) = (Instant::now() + REGISTRATION_TIMEOUT, false);
    let hand_on = async |agent| up.send(v1::RackMessage { agents: vec![agent], ..Default::default() }).await.is_ok();
    loop {
        let message = tokio::select! {
            message = next_message(&shared, stream, &mut said) => message,
            () = up.closed() => break,
            () = tokio::time::sleep_until(deadline), if !has_spoken => break,
        };
        has_spoken = true;
        let Ok(Some(v1::AgentMessage { message: Some(message) })) = message else { break };
        let goes_on = match message {
            Message::Report(report) => shared.report(stream, report),
            // The controller has only our word for who it is.
            Message::Registration(registration)
                if !shared.may_speak_for(stream, &peer, &readable(&registration.server)) =>
            {
                false
            }
            other => {
                shared.other_message(stream, &other);
                hand_on(from_agent(stream, other)).await
            }
        };
        if !goes_on {
            break;
        }
    }
    shared.end(stream);
    hand_on(v1::FromAgent { stream, message: None }).await;
}

/// What agents call.
pub struct Service {
    /// With the connection to the controller.
    pub shared: Arc<Shared>,
    /// Who may speak.
    pub security: Arc<Security>,
}

/// For those that connect to the wrong address.
fn only_agents() -> Status {
    Status::unimplemented("this is a rack: expected an agent here, and everybody else at the controller")
}

#[tonic::async_trait]
impl Control for Service {
    type AgentStream = ReceiverStream<Result<v1::AgentUpdate, Status>>;
    type LoadBalancerStream = ReceiverStream<Result<v1::DataplaneUpdate, Status>>;
    type RackStream = ReceiverStream<Result<v1::RackUpdate, Status>>;

    async fn agent(
        &self,
        request: Request<Streaming<v1::AgentMessage>>,
    ) -> Result<Response<Self::AgentStream>, Status> {
        let peer = AuthenticatedPeer::of(&request, &self.security)?;
        let (answers, updates) = mpsc::channel(QUEUED);
        let (stream, up) = self.shared.begin(answers)?;
        tokio::spawn(serve(self.shared.clone(), peer, stream, request.into_inner(), up));
        Ok(Response::new(ReceiverStream::new(updates)))
    }

    async fn load_balancer(
        &self,
        _request: Request<Streaming<v1::LoadBalancerMessage>>,
    ) -> Result<Response<Self::LoadBalancerStream>, Status> {
        Err(only_agents())
    }

    async fn rack(&self, _request: Request<Streaming<v1::RackMessage>>) -> Result<Response<Self::RackStream>, Status> {
        Err(only_agents())
    }

    async fn fleet(&self, _request: Request<v1::FleetRequest>) -> Result<Response<v1::FleetReply>, Status> {
        Err(only_agents())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_for_a_controller_that_does_not_read_is_bounded() {
        let shared = Shared::default();
        let (messages, _controller) = mpsc::channel(1);
        shared.connected(messages, Reducer::new(Duration::from_secs(1), 8));
        let (answers, _agent) = mpsc::channel(1);
        let (stream, _) = shared.begin(answers).unwrap();
        // The controller has not said yet what is to be reduced: it has them whole.
        let taken = (0..1000).filter(|_| shared.report(stream, v1::Report::default())).count();
        assert_eq!(taken, WAITING);
        assert_eq!(shared.summaries()[0].agents.len(), WAITING);
        assert!(shared.report(stream, v1::Report::default()));
    }

    #[test]
    fn who_was_there_before_the_controller_went_speaks_for_nobody_at_the_next_one() {
        let shared = Shared::default();
        let mut streams = [0, 0];
        for stream in &mut streams {
            let (messages, _controller) = mpsc::channel(1);
            shared.connected(messages, Reducer::new(Duration::from_secs(1), 8));
            let (answers, _agent) = mpsc::channel(1);
            (*stream, _) = shared.begin(answers).unwrap();
        }
        assert!(!shared.report(streams[0], v1::Report::default()));
        shared.end(streams[0]);
        assert!(shared.report(streams[1], v1::Report::default()));
    }
}
