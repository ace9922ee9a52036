//! Events: differences between successive states of the fleet, so that no visible change is missed.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::time::Duration;

use coreward_api::types::{Event, EventId, EventKind, KeyPhase, Overview, OverviewLoadBalancer, ServerState, Severity};
use parking_lot::{Mutex, MutexGuard};
use rand::rand_core::{TryRng as _, UnwrapErr};
use rand::rngs::SysRng;
use tokio::sync::watch;

/// Maximum number of stored events. The oldest ones are removed.
pub const MAX_EVENTS: usize = 1000;

pub struct EventLog {
    /// Random identifier of this run of the controller, which is part of each event's id for clients.
    run_id: String,
    events: Mutex<VecDeque<Event>>,
    newest_id: watch::Sender<u64>,
    last_overview: Mutex<Option<Overview>>,
}

impl Default for EventLog {
    fn default() -> Self {
        let mut bytes = [0; 6];
        let Ok(()) = UnwrapErr(SysRng).try_fill_bytes(&mut bytes);
        Self {
            run_id: bytes.map(|byte| format!("{byte:02x}")).concat(),
            events: Mutex::default(),
            newest_id: watch::Sender::new(0),
            last_overview: Mutex::default(),
        }
    }
}

impl EventLog {
    pub fn run(&self) -> &str {
        &self.run_id
    }

    /// Returns the newest `limit` events whose id is greater than `id`, the oldest first.
    pub fn events_after(&self, id: u64, limit: usize) -> Vec<Event> {
        let events = self.events();
        let newer = events.iter().filter(|event| event.id > id).count();
        events.iter().skip(events.len() - newer.min(limit)).cloned().collect()
    }

    pub fn newest_id(&self) -> watch::Receiver<u64> {
        self.newest_id.subscribe()
    }

    /// Adds an event that does not follow from a change of the fleet's status. `wall_time`: time since 1970.
    pub fn add(&self, (kind, event): (EventKind, EventId), name: &str, message: String, wall: Duration) {
        self.push([NewEvent { severity: Severity::Info, event, kind, name: name.to_owned(), message }], wall);
    }

    /// Compares `overview` with that of the last call, and records the differences as events. `wall_time`: since 1970.
    pub fn record_changes(&self, overview: &Overview, wall: Duration) {
        let mut seen = self.last_overview.lock();
        let happened = match &*seen {
            Some(before) if before == overview => return,
            Some(before) => events_between(before, overview),
            None => {
                let message =
                    format!("the controller has started, configuration {}", overview.configuration_generation);
                let (kind, event) = (EventKind::Controller, EventId::ControllerStarted);
                vec![NewEvent { severity: Severity::Info, event, kind, name: String::new(), message }]
            }
        };
        *seen = Some(overview.clone());
        self.push(happened, wall);
    }

    fn push(&self, happened: impl IntoIterator<Item = NewEvent>, wall: Duration) {
        let mut events = self.events();
        let before = *self.newest_id.borrow();
        let mut id = before;
        for NewEvent { severity, event, kind, name, message } in happened {
            id += 1;
            let (event_name, kind_name) = (event.name(), kind.to_string());
            match severity {
                Severity::Info => tracing::info!(event = event_name, id, kind = kind_name, name, "{message}"),
                Severity::Warning => tracing::warn!(event = event_name, id, kind = kind_name, name, "{message}"),
            }
            events.push_back(Event { id, at_unix_ms: wall.as_millis() as u64, severity, event, kind, name, message });
        }
        let superfluous = events.len().saturating_sub(MAX_EVENTS);
        events.drain(..superfluous);
        drop(events);
        if id > before {
            self.newest_id.send_replace(id);
        }
    }

    fn events(&self) -> MutexGuard<'_, VecDeque<Event>> {
        self.events.lock()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct NewEvent {
    severity: Severity,
    event: EventId,
    kind: EventKind,
    name: String,
    message: String,
}

/// Returns the events that follow from the differences of two states of the fleet.
fn events_between(before: &Overview, after: &Overview) -> Vec<NewEvent> {
    let mut found = NewEvents(Vec::new());
    if before.fleet_generation != after.fleet_generation {
        let message = format!("the document of generation {} is in force", after.fleet_generation);
        found.info((EventKind::Fleet, EventId::FleetInForce), "", message);
    }
    add_service_events(before, after, &mut found);
    add_server_events(before, after, &mut found);
    add_load_balancer_events(before, after, &mut found);
    add_key_events(before, after, &mut found);
    found.0
}

struct NewEvents(Vec<NewEvent>);

impl NewEvents {
    fn info(&mut self, kind: (EventKind, EventId), name: &str, message: impl Into<String>) {
        self.add(Severity::Info, kind, name, message);
    }

    fn warning(&mut self, kind: (EventKind, EventId), name: &str, message: impl Into<String>) {
        self.add(Severity::Warning, kind, name, message);
    }

    fn add(&mut self, severity: Severity, (kind, event): (EventKind, EventId), name: &str, message: impl Into<String>) {
        self.0.push(NewEvent { severity, event, kind, name: name.to_owned(), message: message.into() });
    }

    /// Adds events for warnings that begin or end. If only a number in a warning changes, there is no event.
    fn add_warning_changes(&mut self, kind: EventKind, name: &str, before: &[String], after: &[String]) {
        let [old, new] = [before, after].map(|warnings| -> BTreeMap<String, &String> {
            warnings.iter().map(|warning| (without_numbers(warning), warning)).collect()
        });
        for (_, warning) in new.iter().filter(|(bare, _)| !old.contains_key(*bare)) {
            self.warning((kind, EventId::WarningBegins), name, *warning);
        }
        for (_, warning) in old.iter().filter(|(bare, _)| !new.contains_key(*bare)) {
            self.info((kind, EventId::WarningEnds), name, format!("ended: {warning}"));
        }
    }
}

fn without_numbers(text: &str) -> String {
    text.chars().filter(|c| !c.is_ascii_digit()).collect()
}

fn add_service_events(before: &Overview, after: &Overview, found: &mut NewEvents) {
    let kind = EventKind::Service;
    let [old, new] = [before, after]
        .map(|overview| overview.services.iter().map(|service| (&*service.name, service)).collect::<BTreeMap<_, _>>());
    for (name, service) in &new {
        match old.get(name) {
            None => {
                let message = format!("new, at {}: {}", service.address, service.policy);
                found.info((kind, EventId::ServiceNew), name, message);
                found.add_warning_changes(kind, name, &[], &service.warnings);
            }
            Some(was) => {
                if was.policy != service.policy {
                    found.info(
                        (kind, EventId::ServicePolicy),
                        name,
                        format!("policy {} instead of {}", service.policy, was.policy),
                    );
                }
                found.add_warning_changes(kind, name, &was.warnings, &service.warnings);
            }
        }
    }
    old.keys()
        .filter(|name| !new.contains_key(*name))
        .for_each(|name| found.info((kind, EventId::ServiceGone), name, "left the document"));
}

fn add_server_events(before: &Overview, after: &Overview, found: &mut NewEvents) {
    let kind = EventKind::Server;
    let [old, new] = [before, after]
        .map(|overview| overview.servers.iter().map(|server| (server.id, server)).collect::<BTreeMap<_, _>>());
    for (id, server) in &new {
        let Some(was) = old.get(id) else {
            found.info(
                (kind, EventId::ServerNew),
                &server.name,
                format!("new, at {}: {}", server.address, server.state),
            );
            found.add_warning_changes(kind, &server.name, &[], &server.warnings);
            continue;
        };
        if was.state != server.state {
            let reason = if server.state_reason.is_empty() { "" } else { ": " };
            let message = format!("{} (was {}){reason}{}", server.state, was.state, server.state_reason);
            match server.state {
                ServerState::Down => found.warning((kind, EventId::ServerState), &server.name, message),
                _ => found.info((kind, EventId::ServerState), &server.name, message),
            }
        }
        if was.weight != server.weight {
            found.info(
                (kind, EventId::ServerWeight),
                &server.name,
                format!("weight {} instead of {}", server.weight, was.weight),
            );
        }
        found.add_warning_changes(kind, &server.name, &was.warnings, &server.warnings);
    }
    let gone = old.iter().filter(|(id, _)| !new.contains_key(*id));
    gone.for_each(|(_, server)| {
        found.info((kind, EventId::ServerForgotten), &server.name, "forgotten: its id is free again")
    });
}

fn add_load_balancer_events(before: &Overview, after: &Overview, found: &mut NewEvents) {
    let kind = EventKind::LoadBalancer;
    let state = |balancer: &OverviewLoadBalancer| match (balancer.connected, balancer.alive) {
        (true, true) => "connected",
        (true, false) => "silent",
        (false, true) => "disconnected",
        (false, false) => "lost",
    };
    let [old, new] = [before, after]
        .map(|overview| overview.load_balancers.iter().map(|lb| (&*lb.name, lb)).collect::<BTreeMap<_, _>>());
    let names: BTreeSet<&str> = old.keys().chain(new.keys()).copied().collect();
    for name in names {
        match (old.get(name).map(|was| state(was)), new.get(name).map(|is| state(is))) {
            (was, Some(is)) if was != Some(is) => match is {
                "silent" | "lost" => found.warning((kind, EventId::LoadBalancerState), name, is),
                _ => found.info((kind, EventId::LoadBalancerState), name, is),
            },
            (Some(_), None) => found.info((kind, EventId::LoadBalancerForgotten), name, "forgotten"),
            _ => {}
        }
        let warnings = |overview: &BTreeMap<&str, &OverviewLoadBalancer>| {
            overview.get(name).map(|balancer| balancer.warnings.clone()).unwrap_or_default()
        };
        found.add_warning_changes(kind, name, &warnings(&old), &warnings(&new));
    }
}

fn add_key_events(before: &Overview, after: &Overview, found: &mut NewEvents) {
    let (old, new) = (&before.keys, &after.keys);
    if (old.phase, new.phase) == (KeyPhase::Steady, KeyPhase::Announced) {
        found.info((EventKind::Keys, EventId::KeysAnnounced), "", "the next cookie key is being distributed");
    }
    if old.current != new.current {
        found.info((EventKind::Keys, EventId::KeysSwitched), "", format!("key {} stamps from now on", new.current));
    }
}
