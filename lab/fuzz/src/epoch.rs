//! Epoch: a new load balancer, and some hundred thousand packets and changes that one seed determines.

use coreward_model::connection_table::OwnerNumber;
use coreward_model::lb::Outcome;

use crate::change::{Change, Difference};
use crate::fuzz_rng::FuzzRng;
use crate::gen_state::GenState;
use crate::harness::{Harness, HarnessSetup};
use crate::{frame, generate};

pub const PACKET_COUNT: u64 = 200_000;
/// Number of packets between two comparisons of the whole state.
const STATE_INTERVAL: u64 = 4096;

/// Input of an epoch: a change of the state, or a packet.
#[derive(Debug, Clone)]
pub enum Step {
    Change(Change),
    Packet(Vec<u8>),
}

/// Generator of packets and changes, with the harness that processes them.
pub struct Epoch {
    rng: FuzzRng,
    state: GenState,
    /// BPF program with its reference model, or the reference model only.
    pub harness: Harness,
    /// Changes that must be applied before the next packet, in reverse order.
    due_changes: Vec<Change>,
    packet: Vec<u8>,
    packets: u64,
}

/// Difference between program and reference model, and the packet that showed it.
#[derive(Debug)]
pub struct Mismatch {
    /// Number of packets from the start of the epoch up to the one that shows the difference.
    pub packets: u64,
    pub difference: Difference,
}

impl Epoch {
    /// Starts the epoch of a seed. `with_program` also loads the BPF program, which needs capabilities.
    pub fn new(seed: u64, with_program: bool) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(seed, 0);
        let mut state = GenState::new(&mut rng);
        let harness = Harness::new(state.setup, with_program)?;
        let number = OwnerNumber::try_from(1).expect("in range");
        let due_changes = vec![state.new_services(&mut rng), Change::LocalOwnerNumber(Some(number))];
        Ok(Self { rng, state, harness, due_changes, packet: Vec::new(), packets: 0 })
    }

    fn draw_changes(&mut self) {
        match self.rng.below(20_000) {
            0 => self.due_changes.push(self.state.new_services(&mut self.rng)),
            1 => self.due_changes.extend(self.state.table_change(&mut self.rng)),
            2..100 => self.due_changes.push(self.state.small_change(&mut self.rng)),
            100..110 if self.state.frees_connections => {
                let free = self.draw_free_change();
                self.due_changes.push(free);
            }
            _ => {}
        }
    }

    /// Returns a change that frees a random part of the connection table's entries.
    fn draw_free_change(&mut self) -> Change {
        let mut indexes: Vec<_> = self.harness.model.connections().map(|connection| connection.index).collect();
        let share = self.rng.below(4);
        indexes.retain(|_| self.rng.below(4) < share);
        if self.rng.chance(1, 2) {
            indexes.reverse();
        }
        Change::Free(indexes)
    }

    fn apply(&mut self, change: &Change) -> anyhow::Result<()> {
        let service_slots = self.harness.change(change)?;
        if let Change::Services(services) = change {
            self.state.record_service_slots(services, &service_slots);
            for service in 0..services.len() {
                // Only new services: services that stay keep their servers.
                if self.state.services[service].servers.is_empty() {
                    let mut filling = self.state.fill_service(service, &mut self.rng);
                    filling.reverse();
                    self.due_changes.splice(0..0, filling);
                }
            }
        }
        Ok(())
    }

    /// Applies all due changes, after adding random ones if none is due. Passes each change to `record`.
    fn apply_due_changes(&mut self, mut record: impl FnMut(Change)) -> anyhow::Result<()> {
        if self.due_changes.is_empty() {
            self.draw_changes();
        }
        while let Some(change) = self.due_changes.pop() {
            self.apply(&change)?;
            record(change);
        }
        Ok(())
    }

    /// Generates the next packet, stores it in `self.packet`, and processes it in the harness.
    fn process_next_packet(&mut self) -> anyhow::Result<(Outcome, Option<Difference>)> {
        generate::write_packet(&self.state, &mut self.rng, &mut self.packet);
        self.packets += 1;
        let (outcome, difference) = self.harness.process_packet(&self.packet)?;
        self.state.observe(&outcome, &frame::untagged(&self.packet));
        Ok((outcome, difference))
    }

    /// Processes packets up to number `packets` or the first difference. Passes every outcome to `seen`.
    pub fn run(&mut self, packets: u64, mut seen: impl FnMut(Outcome)) -> anyhow::Result<Option<Mismatch>> {
        while self.packets < packets {
            self.apply_due_changes(|_| ())?;
            let (outcome, difference) = self.process_next_packet()?;
            seen(outcome);
            let difference = difference.or_else(|| {
                let due = self.packets.is_multiple_of(STATE_INTERVAL) || self.packets == packets;
                due.then(|| self.harness.compare_state()).flatten()
            });
            if let Some(difference) = difference {
                return Ok(Some(Mismatch { packets: self.packets, difference }));
            }
        }
        Ok(None)
    }

    /// Compares the tables that are too large for a comparison during the epoch.
    pub fn compare_large_tables(&self) -> anyhow::Result<Option<Mismatch>> {
        let flows = self.harness.compare_tables()?;
        Ok(flows.map(|difference| Mismatch { packets: self.packets, difference }))
    }

    /// Returns the setup of the epoch that this seed determines, and its steps up to packet number `packets`.
    pub fn steps(seed: u64, packets: u64) -> anyhow::Result<(HarnessSetup, Vec<Step>)> {
        let mut epoch = Epoch::new(seed, false)?;
        let setup = epoch.state.setup;
        let mut steps = Vec::new();
        while epoch.packets < packets {
            epoch.apply_due_changes(|change| steps.push(Step::Change(change)))?;
            epoch.process_next_packet()?;
            steps.push(Step::Packet(epoch.packet.clone()));
        }
        Ok((setup, steps))
    }
}
