//! Which tables load balancers have in force, and how long that took from the report that made each of them due.

use std::collections::{HashMap, VecDeque};

use coreward_metrics::latency::LatencyHistogram;
use coreward_wire::ServiceIndex;

use super::Now;
use super::service::TableTrigger;

/// Tables of a service that are remembered until load balancers say that they are in force. One that is slower than so many
/// tables is not measured: some seconds' worth.
const REMEMBERED: usize = 1024;

/// Causes of the newest tables, and what became of them.
#[derive(Debug, Default)]
pub struct TableAcks {
    made: HashMap<ServiceIndex, VecDeque<(u64, TableTrigger)>>,
    /// By load balancer's session and service: the newest generation that was said to be in force.
    confirmed: HashMap<(u64, ServiceIndex), u64>,
    /// From the receipt of a report to the word that the table which it made due is in force, at each load balancer.
    pub since_receipt: LatencyHistogram,
    /// The same from when the agent sent it, by its wall clock.
    pub since_sent: LatencyHistogram,
}

impl TableAcks {
    /// A table has been made.
    pub fn record_build(&mut self, service: ServiceIndex, generation: u64, trigger: TableTrigger) {
        let made = self.made.entry(service).or_default();
        if made.len() == REMEMBERED {
            made.pop_front();
        }
        made.push_back((generation, trigger));
    }

    /// The load balancer with that session says that this table is in force. A table that it never had was overtaken: what
    /// made it due is in this one.
    pub fn confirm(&mut self, session: u64, service: ServiceIndex, generation: u64, now: Now) {
        let Some(made) = self.made.get(&service) else { return };
        let before = self.confirmed.insert((session, service), generation);
        // What was made before it came says nothing.
        let Some(before) = before else { return };
        let first = made.partition_point(|(made, _)| *made <= before);
        for (_, trigger) in made.range(first..).take_while(|(made, _)| *made <= generation) {
            if trigger.is_load {
                self.since_receipt.observe(now.monotonic.saturating_sub(trigger.received));
            }
            if let Some(sent) = trigger.sent {
                self.since_sent.observe(now.wall.saturating_sub(sent));
            }
        }
    }

    /// The load balancer's session has ended.
    pub fn forget(&mut self, session: u64) {
        self.confirmed.retain(|(of, _), _| *of != session);
    }

    pub fn retain(&mut self, is_there: impl Fn(ServiceIndex) -> bool) {
        self.made.retain(|service, _| is_there(*service));
        self.confirmed.retain(|(_, service), _| is_there(*service));
    }
}
