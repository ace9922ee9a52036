//! Epoch of the fuzzer, which is a new load balancer with some hundred thousand packets and changes from one seed.

use coreward_model::connection_table::TableOwnerNumber;
use coreward_model::lb::FrameOutcome;

use crate::fuzz_rng::FuzzRng;
use crate::harness::{FuzzHarness, FuzzHarnessSetup};
use crate::packet_generator_state::PacketGeneratorState;
use crate::state_change::{LoadBalancerStateChange, ModelDifference};
use crate::{frame, packet_generator};

pub const PACKETS_PER_EPOCH: u64 = 200_000;
/// Number of packets between two comparisons of the program's state with the model's.
const PACKETS_PER_STATE_COMPARISON: u64 = 4096;

/// Step of an epoch, which is a change to the state or a packet to process.
#[derive(Debug, Clone)]
pub enum FuzzEpochStep {
    Change(LoadBalancerStateChange),
    Packet(Vec<u8>),
}

/// Generator of packets and changes, with the harness that processes them.
pub struct FuzzEpoch {
    rng: FuzzRng,
    generator_state: PacketGeneratorState,
    /// BPF program with its reference model, or the reference model alone.
    pub harness: FuzzHarness,
    /// Changes that must be applied before the next packet, in reverse order.
    due_changes: Vec<LoadBalancerStateChange>,
    packet_buffer: Vec<u8>,
    processed_packet_count: u64,
}

/// Difference between the BPF program and its reference model, and the packet that showed it.
#[derive(Debug)]
pub struct ModelMismatch {
    /// Number of packets from the start of the epoch up to the one that shows the difference.
    pub processed_packet_count: u64,
    pub difference: ModelDifference,
}

impl FuzzEpoch {
    /// Starts the epoch that `seed` determines. If `runs_bpf_program` is true, also loads the BPF program, which needs
    /// capabilities.
    pub fn new(seed: u64, runs_bpf_program: bool) -> anyhow::Result<Self> {
        let mut rng = FuzzRng::new(seed, 0);
        let mut generator_state = PacketGeneratorState::new(&mut rng);
        let harness = FuzzHarness::new(generator_state.harness_setup, runs_bpf_program)?;
        let owner_number = TableOwnerNumber::try_from(1).expect("in range");
        let due_changes = vec![
            generator_state.random_services_change(&mut rng),
            LoadBalancerStateChange::SetLocalOwnerNumber(Some(owner_number)),
        ];
        Ok(Self { rng, generator_state, harness, due_changes, packet_buffer: Vec::new(), processed_packet_count: 0 })
    }

    fn add_random_changes(&mut self) {
        match self.rng.random_below(20_000) {
            0 => self.due_changes.push(self.generator_state.random_services_change(&mut self.rng)),
            1 => self.due_changes.extend(self.generator_state.random_change_with_grace_period(&mut self.rng)),
            2..100 => self.due_changes.push(self.generator_state.random_change_without_grace_period(&mut self.rng)),
            100..110 if self.generator_state.frees_connections => {
                let free_entries_change = self.random_entry_freeing_change();
                self.due_changes.push(free_entries_change);
            }
            _ => {}
        }
    }

    /// Returns a change that frees a random part of the connection table's entries.
    fn random_entry_freeing_change(&mut self) -> LoadBalancerStateChange {
        let mut entry_indexes: Vec<_> = self.harness.model.connections().map(|connection| connection.index).collect();
        let quarters_to_free = self.rng.random_below(4);
        entry_indexes.retain(|_| self.rng.random_below(4) < quarters_to_free);
        if self.rng.random_bool(1, 2) {
            entry_indexes.reverse();
        }
        LoadBalancerStateChange::FreeConnectionEntries(entry_indexes)
    }

    fn apply_change(&mut self, change: &LoadBalancerStateChange) -> anyhow::Result<()> {
        let service_slots = self.harness.apply_change(change)?;
        if let LoadBalancerStateChange::ReplaceServices(services) = change {
            self.generator_state.record_service_slots(services, &service_slots);
            for service_index in 0..services.len() {
                // Only new services need these changes, because services that stay keep their servers.
                if self.generator_state.services[service_index].server_ids.is_empty() {
                    let mut new_service_changes =
                        self.generator_state.changes_to_fill_service(service_index, &mut self.rng);
                    new_service_changes.reverse();
                    self.due_changes.splice(0..0, new_service_changes);
                }
            }
        }
        Ok(())
    }

    /// Applies all due changes. If none is due, sometimes adds random ones first. Passes each change to `record`.
    fn apply_due_changes(&mut self, mut record: impl FnMut(LoadBalancerStateChange)) -> anyhow::Result<()> {
        if self.due_changes.is_empty() {
            self.add_random_changes();
        }
        while let Some(change) = self.due_changes.pop() {
            self.apply_change(&change)?;
            record(change);
        }
        Ok(())
    }

    /// Generates the next packet, stores it in `self.packet_buffer`, and processes it in the harness.
    fn process_next_packet(&mut self) -> anyhow::Result<(FrameOutcome, Option<ModelDifference>)> {
        packet_generator::write_random_packet(&self.generator_state, &mut self.rng, &mut self.packet_buffer);
        self.processed_packet_count += 1;
        let (outcome, difference) = self.harness.process_packet(&self.packet_buffer)?;
        self.generator_state.record_table_connection(&outcome, &frame::strip_vlan_tag(&self.packet_buffer));
        Ok((outcome, difference))
    }

    /// Processes packets up to number `packet_limit` or the first difference. Passes every outcome to `record_outcome`.
    pub fn run_until_packet_number(
        &mut self,
        packet_limit: u64,
        mut record_outcome: impl FnMut(FrameOutcome),
    ) -> anyhow::Result<Option<ModelMismatch>> {
        while self.processed_packet_count < packet_limit {
            self.apply_due_changes(|_| ())?;
            let (outcome, difference) = self.process_next_packet()?;
            record_outcome(outcome);
            let difference = difference.or_else(|| {
                let is_comparison_due = self.processed_packet_count.is_multiple_of(PACKETS_PER_STATE_COMPARISON)
                    || self.processed_packet_count == packet_limit;
                is_comparison_due.then(|| self.harness.compare_state()).flatten()
            });
            if let Some(difference) = difference {
                return Ok(Some(ModelMismatch { processed_packet_count: self.processed_packet_count, difference }));
            }
        }
        Ok(None)
    }

    /// Compares the program's largest tables with the model's. The comparisons during the epoch omit them.
    pub fn compare_large_tables(&self) -> anyhow::Result<Option<ModelMismatch>> {
        let table_difference = self.harness.compare_large_tables()?;
        Ok(table_difference
            .map(|difference| ModelMismatch { processed_packet_count: self.processed_packet_count, difference }))
    }

    /// Returns the setup of the epoch that `seed` determines, and its steps up to packet number `packet_limit`.
    pub fn record_steps(seed: u64, packet_limit: u64) -> anyhow::Result<(FuzzHarnessSetup, Vec<FuzzEpochStep>)> {
        let mut epoch = FuzzEpoch::new(seed, false)?;
        let setup = epoch.generator_state.harness_setup;
        let mut steps = Vec::new();
        while epoch.processed_packet_count < packet_limit {
            epoch.apply_due_changes(|change| steps.push(FuzzEpochStep::Change(change)))?;
            epoch.process_next_packet()?;
            steps.push(FuzzEpochStep::Packet(epoch.packet_buffer.clone()));
        }
        Ok((setup, steps))
    }
}
