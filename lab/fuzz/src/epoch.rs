//! One epoch: a fresh load balancer, and some hundred thousand packets and changes that one seed determines.

use coreward_model::connection_table::OwnerNumber;
use coreward_model::lb::Outcome;

use crate::change::{Change, Difference};
use crate::fuzz_rng::FuzzRng;
use crate::gen_state::GenState;
use crate::harness::{Harness, Setup};
use crate::{frame, generate};

pub const PACKETS: u64 = 200_000;
/// Packets between two comparisons of the whole state.
const STATE_EVERY: u64 = 4096;

/// Step of an epoch.
#[derive(Debug, Clone)]
pub enum Step {
    Change(Change),
    Packet(Vec<u8>),
}

/// The random numbers of an epoch, and what has been made of them.
pub struct Epoch {
    rng: FuzzRng,
    state: GenState,
    /// Both load balancers, or only the reference model.
    pub harness: Harness,
    /// Changes that are due before the next packet.
    due: Vec<Change>,
    packet: Vec<u8>,
    packets: u64,
}

/// A difference, and after how many packets of the epoch.
#[derive(Debug)]
pub struct Found {
    /// The packets given, the one that differs included.
    pub packets: u64,
    pub difference: Difference,
}

impl Epoch {
    /// The epoch of a seed, at its start. Fails when `with_program`, without the right to load it.
    pub fn new(seed: u64, with_program: bool) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(seed, 0);
        let mut state = GenState::new(&mut rng);
        let harness = Harness::new(state.setup, with_program)?;
        let number = OwnerNumber::try_from(1).expect("in range");
        let due = vec![state.new_services(&mut rng), Change::Number(Some(number))];
        Ok(Self { rng, state, harness, due, packet: Vec::new(), packets: 0 })
    }

    fn draw_changes(&mut self) {
        match self.rng.below(20_000) {
            0 => self.due.push(self.state.new_services(&mut self.rng)),
            1 => self.due.extend(self.state.table_change(&mut self.rng)),
            2..100 => self.due.push(self.state.small_change(&mut self.rng)),
            100..110 if self.state.frees_connections => {
                let free = self.free();
                self.due.push(free);
            }
            _ => {}
        }
    }

    /// Some of the connection table's entries are freed, in any order.
    fn free(&mut self) -> Change {
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
            self.state.services_placed(services, &service_slots);
            for service in 0..services.len() {
                // Servers that were there stay as they are.
                if self.state.services[service].servers.is_empty() {
                    let mut filling = self.state.fill_service(service, &mut self.rng);
                    filling.reverse();
                    self.due.splice(0..0, filling);
                }
            }
        }
        Ok(())
    }

    /// Applies the changes that are due; `record` is given them.
    fn change(&mut self, mut record: impl FnMut(Change)) -> anyhow::Result<()> {
        if self.due.is_empty() {
            self.draw_changes();
        }
        while let Some(change) = self.due.pop() {
            self.apply(&change)?;
            record(change);
        }
        Ok(())
    }

    /// Passes the next packet, in `self.packet`, to the harness.
    fn packet(&mut self) -> anyhow::Result<(Outcome, Option<Difference>)> {
        generate::packet(&self.state, &mut self.rng, &mut self.packet);
        self.packets += 1;
        let (outcome, difference) = self.harness.packet(&self.packet)?;
        self.state.observe(&outcome, &frame::untagged(&self.packet));
        Ok((outcome, difference))
    }

    /// Gives packets up to number `packets` and compares. Every outcome goes to `seen`.
    pub fn run(&mut self, packets: u64, mut seen: impl FnMut(Outcome)) -> anyhow::Result<Option<Found>> {
        while self.packets < packets {
            self.change(|_| ())?;
            let (outcome, difference) = self.packet()?;
            seen(outcome);
            let difference = difference.or_else(|| {
                let due = self.packets.is_multiple_of(STATE_EVERY) || self.packets == packets;
                due.then(|| self.harness.compare_state()).flatten()
            });
            if let Some(difference) = difference {
                return Ok(Some(Found { packets: self.packets, difference }));
            }
        }
        Ok(None)
    }

    /// Compares what is too large to be compared now and then.
    pub fn end(&self) -> anyhow::Result<Option<Found>> {
        let flows = self.harness.compare_tables()?;
        Ok(flows.map(|difference| Found { packets: self.packets, difference }))
    }

    /// Start of the epoch of `seed`, and its steps up to packet number `packets`.
    pub fn steps(seed: u64, packets: u64) -> anyhow::Result<(Setup, Vec<Step>)> {
        let mut epoch = Epoch::new(seed, false)?;
        let setup = epoch.state.setup;
        let mut steps = Vec::new();
        while epoch.packets < packets {
            epoch.change(|change| steps.push(Step::Change(change)))?;
            epoch.packet()?;
            steps.push(Step::Packet(epoch.packet.clone()));
        }
        Ok((setup, steps))
    }
}
