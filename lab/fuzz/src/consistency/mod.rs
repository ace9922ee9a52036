//! Consistency check: every packet of a connection reaches the server of its first packet, despite all changes. Many
//! connections run in virtual time through several load balancers, while servers, load balancers and keys change.
//!
//! Real: the load balancers, each a BPF program (by test runs) with its reference model, and all their updates:
//! servers, tables, keys. Modelled: clients ([`client`]); servers that stamp and restore as `bpf/server/server.bpf.c`
//! does ([`server`]); and a controller whose updates arrive at different times ([`controller`]). The modelled network
//! loses answers and selects a load balancer by the connection's hash, sometimes another one.
//!
//! Invariant for connections with timestamps: a server accepts only SYNs, bare resets and packets of its own
//! connections, and one server accepts all packets of a connection. A packet may be dropped or broadcast; the client
//! then sends it again. A SYN sent twice may reach two servers (the client answers one of them); that is counted.
//! Connections without timestamps have no such guarantee when the pool changes; broken ones are counted.

mod client;
mod controller;
mod report;
mod server;

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashSet};
use std::net::Ipv4Addr;

use coreward_intf as intf;
use coreward_model::consistency::{Consistency, ServiceMode};
use coreward_model::forwarding::Forwarding;
use coreward_model::lb::Mac;

use crate::fuzz_rng::FuzzRng;
use crate::harness::Harness;
use crate::ipv6;
use client::Connection;
use controller::Controller;
pub use report::Report;
use server::Server;

/// Maximum time between two packets of a connection (ms).
pub const MAX_IDLE_MS: u64 = 60_000;

/// Configuration of a simulation.
#[derive(Debug, Clone, Copy)]
pub struct Config {
    /// Number of connections, which are opened at a constant rate.
    pub connections: u32,
    /// Virtual time during which connections are opened (minutes).
    pub minutes: u32,
    /// Number of changes per minute: servers and load balancers that join and leave, health, addresses, tables.
    pub changes_per_minute: u32,
    /// Interval between new keys (ms). It must exceed the longest idle time of a connection ([`MAX_IDLE_MS`]):
    /// otherwise another key would decode the connection's cookie.
    pub key_rotation_ms: u64,
    pub load_balancers: usize,
    /// Consistency mode of the service: stateless or stateful.
    pub consistency: Consistency,
    pub forwarding: Forwarding,
    /// Whether the service has an IPv6 VIP.
    pub ipv6: bool,
    /// Seed from which all random choices are made.
    pub seed: u64,
    /// Whether the BPF programs run and are compared with their reference models.
    pub with_program: bool,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            connections: 1_000_000,
            minutes: 10,
            changes_per_minute: 80,
            key_rotation_ms: 2 * MAX_IDLE_MS,
            load_balancers: 2,
            consistency: Consistency::Stateless,
            forwarding: Forwarding::L2,
            ipv6: false,
            seed: 1,
            with_program: true,
        }
    }
}

impl Config {
    /// Returns the VIP and port of the only service. An IPv6 VIP is represented by an IPv4 placeholder.
    fn vip(&self) -> (Ipv4Addr, u16) {
        (if self.ipv6 { ipv6::IPV6_PLACEHOLDERS[0] } else { Ipv4Addr::new(10, 200, 0, 1) }, 80)
    }

    fn mode(&self) -> ServiceMode {
        ServiceMode { consistency: self.consistency, forwarding: self.forwarding, ..ServiceMode::default() }
    }
}

/// Event at a time of the simulation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    /// The next connection is opened.
    Arrival,
    /// The connection with this index sends its next packet.
    Packet(u32),
    /// A random change of the fleet happens.
    Change,
    /// A load balancer (first index) receives the state of a server (second index).
    SendServer(usize, usize),
    /// The load balancer with this index receives the newest table.
    SendTable(usize),
    /// The load balancer with this index receives the newest keys.
    SendKeys(usize),
    SendServerKeys(usize),
    /// A new key replaces the one that is not in use, and is distributed.
    NewKey,
    /// The newest key, which all have received, becomes the current one.
    SwitchKey,
    /// The load balancer with this index starts again, with empty tables.
    Return(usize),
    /// A load balancer (first index) receives whether another one (second index) is alive.
    SendOwner(usize, usize),
    /// The load balancer with this index frees the entries of connections that have ended.
    Sweep(usize),
}

struct LoadBalancer {
    harness: Harness,
    service_slot: usize,
    alive: bool,
}

/// State of the whole simulation.
struct Simulation {
    config: Config,
    rng: FuzzRng,
    /// Current virtual time (ms).
    now_ms: u64,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled_count: u64,
    controller: Controller,
    servers: Vec<Server>,
    load_balancers: Vec<LoadBalancer>,
    connections: Vec<Option<Connection>>,
    opened_count: u32,
    /// Addresses and ports of the clients with open connections.
    open_clients: HashSet<(Ipv4Addr, u16)>,
    /// Addresses and ports of clients whose connections have ended, of which some are used again.
    ended_clients: Vec<(Ipv4Addr, u16)>,
    report: Report,
}

fn load_balancer_mac(number: usize) -> Mac {
    [2, 0, 0, 0, 0, number as u8]
}

/// Runs a simulation. Fails when a BPF program and its reference model differ, or the kernel rejects an update.
pub fn run(config: Config) -> anyhow::Result<Report> {
    let mut simulation = Simulation::new(config)?;
    while let Some(Reverse((time, _, event))) = simulation.events.pop() {
        simulation.now_ms = time;
        simulation.apply_event(event)?;
    }
    Ok(simulation.report)
}

impl Simulation {
    fn schedule(&mut self, delay_ms: u64, event: Event) {
        self.scheduled_count += 1;
        self.events.push(Reverse((self.now_ms + delay_ms, self.scheduled_count, event)));
    }

    fn end_ms(&self) -> u64 {
        u64::from(self.config.minutes) * 60_000
    }

    fn apply_event(&mut self, event: Event) -> anyhow::Result<()> {
        match event {
            Event::Arrival => self.open_next_connection(),
            Event::Packet(connection) => self.advance_connection(connection),
            Event::Change => self.change(),
            Event::SendServer(number, server) => self.send_server_to(number, server),
            Event::SendTable(number) => self.send_table_to(number),
            Event::SendKeys(number) => self.send_keys_to(number),
            Event::SendServerKeys(server) => {
                self.servers[server].set_keys(self.controller.keys, self.now_ms);
                Ok(())
            }
            Event::NewKey => self.distribute_new_key(),
            Event::SwitchKey => self.switch_key(),
            Event::Return(number) => self.start_load_balancer(number),
            Event::SendOwner(number, other) => self.send_owner_to(number, other),
            Event::Sweep(number) => self.sweep(number),
        }
    }

    /// Processes a frame in load balancer `number`. Returns the counter of its outcome, and the frame as it leaves.
    fn forward_through(&mut self, number: usize, frame: &[u8]) -> anyhow::Result<(intf::lb_counter, Vec<u8>)> {
        let harness = &mut self.load_balancers[number].harness;
        let (outcome, difference) = harness.process_packet(frame)?;
        if let Some(difference) = difference {
            anyhow::bail!("load balancer {number}, BPF program and reference model differ in {difference}");
        }
        self.report.outcomes[outcome.counter as usize] += 1;
        Ok((outcome.counter, harness.frame_after().to_vec()))
    }
}
