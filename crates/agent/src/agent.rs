//! The agent's state, configuration and reports. [`crate::daemon`] calls it periodically.

mod metrics;
mod report;

use std::net::SocketAddr;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, ensure};
use coreward_daemon::ControllerAddresses;
use coreward_dataplane::clock::monotonic_ms;
use coreward_dataplane::pins;
use coreward_dataplane::server::{ServerProgramOptions, ServerPrograms};
use coreward_dataplane::sockets::query_open_sockets;
use coreward_dataplane::vlan_device;
use coreward_dispatch::dispatcher::{self, DispatcherHandle};
use coreward_intf as intf;
use coreward_model::FourTuple;
use coreward_model::key_activation;
use coreward_model::rss::RssConfig;
use coreward_model::tuple::TransportProtocol;
use coreward_wire::{AgentConfiguration, AgentService, SocketAnswer, SocketQuery, UnusableService, v1};

use crate::config::{self, AgentConfig};
use crate::connection_counter::ConnectionCounter;
use crate::connection_stall::{ConnectionStallDetector, HandshakeCounters};
use crate::daisy_chain::DaisyChainNeighbours;
use crate::decapsulation::{self, Decapsulator};
use crate::load::cpu::CpuBusyTimeSource;
use crate::load::published::PublishedLoadFile;
use crate::load::{LoadSource, receive_queue_cpus};
use crate::rss::RssDevice;
use crate::rss::ethtool::EthtoolRssDevice;
use crate::rss::input::InputTransformSearch;
use crate::rss::manager::{DesiredRssSettings, NicRssConfigurator};
use crate::rss::rss_verifier::{RssTableVerdict, RssTableVerifier};
use crate::rss::testbed::TestbedRssDevice;
use crate::rss_conflicts::RssConflicts;
use crate::saved_settings::SettingsStore;
use crate::steering::{self, ConnectionSteering};
use crate::unstamped_syn_acks::{self, UnstampedSynAckMonitor};
use crate::{dispatch, timestamps};

/// Interval between two reports, unless the controller sets a different interval.
pub const DEFAULT_REPORT_INTERVAL: Duration = Duration::from_millis(100);
const RSS_CONFLICT_CHECK_INTERVAL: Duration = Duration::from_secs(20);

pub struct Agent {
    config: AgentConfig,
    /// Name of the network device that has the receive queues: the configured interface, or the device below it if it
    /// is a VLAN interface.
    nic_name: String,
    saved_settings: SettingsStore,
    bpf_programs: ServerPrograms,
    rss_manager: NicRssConfigurator,
    syn_queue_verifier: RssTableVerifier,
    /// Verifier of the RSS table by established connections, which a NIC's flow director may move to other queues.
    established_packet_queue_verifier: RssTableVerifier,
    input_transform_search: InputTransformSearch,
    load_source: Box<dyn LoadSource>,
    steering: ConnectionSteering,
    daisy_chain: DaisyChainNeighbours,
    decapsulator: Decapsulator,
    stall_detector: ConnectionStallDetector,
    unstamped_syn_ack_monitor: UnstampedSynAckMonitor,
    cpu_of_queue: Vec<usize>,
    applied_configuration: Option<AgentConfiguration>,
    /// Parts of the newest configuration that the agent has rejected.
    rejected_updates: Vec<v1::RejectedUpdate>,
    /// Generation of the newest configuration that the agent has accepted on this stream, or 0 if there is none.
    accepted_config_generation: u64,
    report_sequence_number: u64,
    core_busy_ns: Vec<u64>,
    load_read_error: Option<String>,
    maintenance_warnings: Vec<String>,
    rss_conflict_warnings: Vec<String>,
    last_rss_conflict_check: Option<Instant>,
    dispatcher: Option<DispatcherHandle>,
    connection_counter: ConnectionCounter,
}

/// Returns the index of a network device. Fails if this network namespace has no device with that name.
fn find_interface_index(interface: &str) -> anyhow::Result<u32> {
    nix::net::if_::if_nametoindex(interface)
        .with_context(|| format!("interface {interface}: expected a device of this network namespace"))
}

fn create_rss_device(config: &AgentConfig, nic_name: &str) -> Box<dyn RssDevice> {
    match &config.rss {
        config::RssSourceConfig::Ethtool {} => Box::new(EthtoolRssDevice::new(nic_name)),
        config::RssSourceConfig::Testbed { path, entries } => {
            Box::new(TestbedRssDevice::new(path.clone(), nic_name, *entries))
        }
    }
}

/// Attaches the BPF programs, or takes over the programs of an earlier process.
fn attach_programs(config: &AgentConfig, interface_index: u32) -> anyhow::Result<ServerPrograms> {
    let bpf_programs = ServerPrograms::attach(ServerProgramOptions {
        interface_index,
        pin_directory: config.pin_directory.clone(),
        sample_every_syn: false,
    })?;
    let start_action = if bpf_programs.is_state_taken_over() { "taken over" } else { "attached" };
    tracing::info!(
        event = "programs-attached",
        server = config.server,
        interface = config.interface,
        attachment = ?bpf_programs.attach_mechanism(),
        "the agent has {start_action} its BPF programs"
    );
    Ok(bpf_programs)
}

fn start_load_source(config: &config::CoreLoadSourceConfig) -> anyhow::Result<Box<dyn LoadSource>> {
    Ok(match config {
        config::CoreLoadSourceConfig::Cpu {} => Box::new(CpuBusyTimeSource::start()?),
        config::CoreLoadSourceConfig::Published { path } => Box::new(PublishedLoadFile::new(path.clone())),
    })
}

impl Agent {
    /// Attaches the BPF programs or takes over those of an earlier process, and reads the NIC's settings. Fails if the
    /// interface does not exist or the kernel rejects a program.
    pub fn start(config: AgentConfig) -> anyhow::Result<Self> {
        let interface_index = find_interface_index(&config.interface)?;
        let nic_name = vlan_device::underlying_device_or_self(&config.interface);
        let saved_settings = SettingsStore::open(&config.pin_directory)?;
        let bpf_programs = attach_programs(&config, interface_index)?;
        let mut agent = Self {
            dispatcher: config.dispatch.as_ref().map(DispatcherHandle::start).transpose()?,
            load_source: start_load_source(&config.load)?,
            steering: ConnectionSteering::new(config.steer, &config.pin_directory),
            daisy_chain: DaisyChainNeighbours::new(&config.interface),
            decapsulator: Decapsulator::start(&config, interface_index)?,
            stall_detector: ConnectionStallDetector::with_baseline(read_handshake_counters(&bpf_programs)),
            unstamped_syn_ack_monitor: UnstampedSynAckMonitor::with_baseline(unstamped_syn_ack_count(&bpf_programs)),
            rss_manager: NicRssConfigurator::new(create_rss_device(&config, &nic_name)),
            nic_name,
            config,
            saved_settings,
            bpf_programs,
            syn_queue_verifier: RssTableVerifier::default(),
            established_packet_queue_verifier: RssTableVerifier::default(),
            input_transform_search: InputTransformSearch::default(),
            cpu_of_queue: vec![],
            applied_configuration: None,
            rejected_updates: Vec::new(),
            accepted_config_generation: 0,
            report_sequence_number: 0,
            core_busy_ns: vec![],
            load_read_error: None,
            maintenance_warnings: vec![],
            rss_conflict_warnings: vec![],
            last_rss_conflict_check: None,
            connection_counter: ConnectionCounter::default(),
        };
        agent.on_rss_changed();
        agent.run_maintenance();
        Ok(agent)
    }

    pub fn server_name(&self) -> &str {
        &self.config.server
    }

    /// Returns the NIC's RSS key, input transform and indirection table, or `None` if they are unknown.
    pub fn rss_config(&self) -> Option<&RssConfig> {
        self.rss_manager.known_rss()
    }

    pub fn metrics_address(&self) -> Option<SocketAddr> {
        self.config.metrics
    }

    pub fn tls_credential_files(&self) -> Option<&coreward_tls::TlsCredentialFiles> {
        self.config.tls.as_ref()
    }

    pub fn controllers(&self) -> &ControllerAddresses {
        &self.config.controllers
    }

    /// Returns the warnings of the last maintenance run, for `coreward status`.
    pub fn maintenance_warnings(&self) -> &[String] {
        &self.maintenance_warnings
    }

    pub fn report_interval(&self) -> Duration {
        self.applied_configuration
            .as_ref()
            .map_or(DEFAULT_REPORT_INTERVAL, |configuration| configuration.report_interval)
    }

    /// Starts a stream to a controller. Discards the configuration generations of earlier streams, because another
    /// controller may have sent them.
    pub fn begin_controller_stream(&mut self) {
        self.accepted_config_generation = 0;
        self.connection_counter.begin_controller_stream();
    }

    /// Returns the configuration generation to confirm to the controller, or 0 if there is none. A configuration is
    /// confirmed only after the server has switched to its cookie key. Until then, packets are stamped with the
    /// previous key, which the controller may overwrite once all servers have confirmed.
    fn confirmed_config_generation(&self) -> u64 {
        let (_, key_switch_ms) = self.bpf_programs.cookie_keys_and_switch_ms();
        let is_new_key_in_force = monotonic_ms().wrapping_sub(key_switch_ms) as i32 >= 0;
        if is_new_key_in_force { self.accepted_config_generation } else { 0 }
    }

    /// Applies a configuration. If this fails, logs the error and keeps the previous configuration.
    pub fn apply_configuration(
        &mut self,
        mut configuration: AgentConfiguration,
        unusable_services: &[UnusableService],
    ) {
        let generation = configuration.generation;
        for service in unusable_services {
            tracing::warn!(
                event = "service-rejected",
                generation,
                service = service.name,
                error = %service.reason,
                "the agent rejects the service's new configuration and keeps the previous one"
            );
        }
        self.keep_previous_services(&mut configuration, unusable_services);
        self.rejected_updates =
            unusable_services.iter().map(|service| service.to_rejected_update(generation)).collect();
        if let Err(error) = self.try_apply_configuration(&configuration) {
            self.reject_configuration(generation, format!("{error:#}"));
            tracing::warn!(
                event = "configuration-rejected",
                generation,
                error = format!("{error:#}"),
                "the agent cannot apply the controller's configuration: the previous configuration stays in force"
            );
            return;
        }
        let service_names: Vec<&str> = configuration.services.iter().map(|service| service.name.as_str()).collect();
        tracing::info!(
            event = "configuration-applied",
            generation = configuration.generation,
            services = service_names.join(","),
            "the agent has applied the controller's configuration"
        );
        self.accepted_config_generation = configuration.generation;
        self.applied_configuration = Some(configuration);
        self.run_maintenance();
    }

    /// Adds the previous configuration of each service whose new one was rejected, unless another service now has its
    /// address.
    fn keep_previous_services(&self, configuration: &mut AgentConfiguration, unusable_services: &[UnusableService]) {
        let previous_services =
            self.applied_configuration.iter().flat_map(|previous_configuration| &previous_configuration.services);
        let is_rejected = |service: &&AgentService| {
            unusable_services.iter().any(|unusable_service| unusable_service.name == service.name)
        };
        let has_free_address =
            |service: &&AgentService| configuration.services.iter().all(|other| other.address != service.address);
        let kept_services: Vec<AgentService> =
            previous_services.filter(is_rejected).filter(has_free_address).cloned().collect();
        configuration.services.extend(kept_services);
    }

    /// Records that the agent rejects the whole configuration, with the reason.
    pub fn reject_configuration(&mut self, generation: u64, reason: String) {
        self.rejected_updates.retain(|rejected_update| !rejected_update.service.is_empty());
        self.rejected_updates.push(v1::RejectedUpdate { service: String::new(), generation, reason, table: false });
    }

    fn try_apply_configuration(&mut self, new_configuration: &AgentConfiguration) -> anyhow::Result<()> {
        let old_configuration = self.applied_configuration.as_ref();
        if old_configuration.is_none_or(|old| old.keys != new_configuration.keys) {
            let key_switch_ms = key_activation::key_activation_time_ms(
                &self.bpf_programs.cookie_keys_and_switch_ms(),
                &new_configuration.keys,
                monotonic_ms(),
            );
            self.bpf_programs.set_cookie_keys(&new_configuration.keys, key_switch_ms);
        }
        if old_configuration.is_none_or(|old| old.previous_servers != new_configuration.previous_servers) {
            self.daisy_chain.set_previous_servers(&new_configuration.previous_servers, &mut self.bpf_programs)?;
        }
        if old_configuration
            .is_none_or(|old| old.services != new_configuration.services || old.address != new_configuration.address)
        {
            self.apply_services(new_configuration)?;
        }
        if self.config.manage_rss {
            let desired_rss = DesiredRssSettings {
                rss_key: new_configuration.fleet_rss_key.clone(),
                indirection_table_seed: new_configuration.server_id,
            };
            self.rss_manager.start_managing_rss(desired_rss, &mut self.saved_settings);
            self.on_rss_changed();
        }
        Ok(())
    }

    /// Applies a configuration's services, and the address family of the outer headers of encapsulated packets.
    fn apply_services(&mut self, configuration: &AgentConfiguration) -> anyhow::Result<()> {
        if self.config.manage_timestamps && has_stamped_services(configuration) {
            timestamps::manage_timestamps_sysctl(stamps_new_connections(configuration), &mut self.saved_settings)?;
        }
        let service_parameters: Vec<_> = configuration
            .services
            .iter()
            .map(|service| (service.address, service.server_id, service.settings))
            .collect();
        configuration.address.into_iter().for_each(|address| self.bpf_programs.set_outer_family_from_address(address));
        self.bpf_programs.set_services(&service_parameters)?;
        self.decapsulator.set_services(&configuration.services)?;
        // Only TCP services are steered, because only they have listening sockets.
        let tcp_services =
            configuration.services.iter().filter(|service| service.address.protocol == TransportProtocol::Tcp);
        let tcp_service_addresses: Vec<_> = tcp_services.map(|service| service.address).collect();
        self.steering.set_services(&tcp_service_addresses, self.bpf_programs.rss_map_fd())
    }

    /// Rereads what other programs may change: the NIC's RSS settings, the CPUs of its queues, and the services'
    /// workers. Called about once per second.
    pub fn run_maintenance(&mut self) {
        if self.rss_manager.sync_with_nic(&mut self.saved_settings) {
            self.on_rss_changed();
        }
        self.cpu_of_queue = receive_queue_cpus::cpus_of_queues(&self.nic_name, self.rss_manager.receive_queue_count());
        self.load_source.set_queue_cpus(&self.cpu_of_queue);
        self.prevent_bpf_time_overflow();
        self.daisy_chain.apply_mac_address_changes(&mut self.bpf_programs);
        let rss_warning = self.verify_rss_and_warn();
        self.maintenance_warnings.clear();
        if let Some(configuration) =
            self.applied_configuration.as_ref().filter(|configuration| has_stamped_services(configuration))
        {
            self.maintenance_warnings
                .extend(timestamps::timestamps_sysctl_warning(stamps_new_connections(configuration)));
        }
        self.maintenance_warnings.extend(self.daisy_chain.unresolved_servers_warning());
        self.maintenance_warnings.extend(self.decapsulator.missing_program_warning());
        self.maintenance_warnings.extend(
            self.stall_detector.observe_counters(read_handshake_counters(&self.bpf_programs)).map(str::to_owned),
        );
        let foreign_clock_count = unstamped_syn_ack_count(&self.bpf_programs);
        self.maintenance_warnings
            .extend(self.unstamped_syn_ack_monitor.observe_count(foreign_clock_count, Instant::now()));
        let services = self.applied_configuration.iter().flat_map(|configuration| &configuration.services);
        let forwarded_services = services.filter(|service| self.bpf_programs.forwards_syn_acks(&service.address));
        self.maintenance_warnings.extend(forwarded_services.filter_map(unstamped_syn_acks::describe_lost_features));
        self.maintenance_warnings.extend(self.rss_manager.rss_problem().map(str::to_owned));
        self.maintenance_warnings.extend(rss_warning);
        self.maintenance_warnings.extend(self.connection_counter.uncounted_connections_warning());
        self.maintenance_warnings.extend(self.load_source.warnings());
        self.maintenance_warnings.extend(self.steering.update_sockets_and_list_warnings(&self.cpu_of_queue));
        self.maintenance_warnings.extend(self.dispatcher.iter().flat_map(dispatch::dispatcher_warnings));
        if self.last_rss_conflict_check.is_none_or(|checked_at| checked_at.elapsed() > RSS_CONFLICT_CHECK_INTERVAL) {
            self.rss_conflict_warnings = RssConflicts::gather(&self.nic_name).describe_conflicts(&self.nic_name);
            self.last_rss_conflict_check = Some(Instant::now());
        }
        self.maintenance_warnings.extend(self.rss_conflict_warnings.iter().cloned());
    }

    /// Renews the 32-bit times in BPF maps before they are so old that their difference to the current time overflows.
    fn prevent_bpf_time_overflow(&mut self) {
        let (keys, key_switch_ms) = self.bpf_programs.cookie_keys_and_switch_ms();
        let renewed_key_switch_ms = key_activation::renewed_activation_time_ms(key_switch_ms, monotonic_ms());
        if renewed_key_switch_ms != key_switch_ms {
            self.bpf_programs.set_cookie_keys(&keys, renewed_key_switch_ms);
        }
        self.bpf_programs.limit_tsval_clamp_ages(monotonic_ms());
    }

    fn on_rss_changed(&mut self) {
        self.bpf_programs.set_rss_config(self.rss_manager.known_rss(), self.rss_manager.settings_change_count() as u32);
        let (matched_count, mismatched_count) = self.syn_match_and_mismatch_counts();
        self.syn_queue_verifier.restart(matched_count, mismatched_count);
        let (matched_count, mismatched_count) = self.established_match_and_mismatch_counts();
        self.established_packet_queue_verifier.restart(matched_count, mismatched_count);
        self.input_transform_search.restart(self.bpf_programs.newest_syn_sample_sequence());
    }

    fn syn_match_and_mismatch_counts(&self) -> (u64, u64) {
        let counters = self.bpf_programs.counters();
        (counters[intf::SERVER_COUNTER_RSS_MATCHED as usize], counters[intf::SERVER_COUNTER_RSS_MISMATCHED as usize])
    }

    fn verify_rss_and_warn(&mut self) -> Option<String> {
        let (matched_count, mismatched_count) = self.syn_match_and_mismatch_counts();
        let known_rss = self.rss_manager.known_rss()?;
        let syn_verdict =
            self.syn_queue_verifier.observe_counts(&known_rss.indirection_table, matched_count, mismatched_count);
        if syn_verdict == RssTableVerdict::NotInForce {
            let syn_samples =
                self.bpf_programs.syn_samples_after_sequence(self.input_transform_search.last_sample_number());
            if let Some(input_transform) = self.input_transform_search.observe_samples(known_rss, &syn_samples) {
                self.rss_manager.set_observed_transform(input_transform);
                self.on_rss_changed();
                return None;
            }
        }
        if syn_verdict == RssTableVerdict::NotInForce {
            return Some(format!(
                "the RSS table that {} shows is not in force: {mismatched_count} of {} SYNs arrived on another receive \
                 queue",
                self.nic_name,
                matched_count + mismatched_count
            ));
        }
        let (matched_count, mismatched_count) = self.established_match_and_mismatch_counts();
        let established_verdict = self.established_packet_queue_verifier.observe_counts(
            &known_rss.indirection_table,
            matched_count,
            mismatched_count,
        );
        (established_verdict == RssTableVerdict::NotInForce).then(|| {
            format!(
                "{} moves open connections to other receive queues than RSS chose: {mismatched_count} of {} packets \
                 sampled (ATR of ixgbe and i40e? `coreward doctor` names the remedy)",
                self.nic_name,
                matched_count + mismatched_count
            )
        })
    }

    fn established_match_and_mismatch_counts(&self) -> (u64, u64) {
        let counters = self.bpf_programs.counters();
        let read_counter = |counter: intf::server_counter| counters[counter as usize];
        (
            read_counter(intf::SERVER_COUNTER_RSS_ESTABLISHED_MATCHED),
            read_counter(intf::SERVER_COUNTER_RSS_ESTABLISHED_MISMATCHED),
        )
    }

    /// Returns which of the queried connections still have a socket on this server. Reports all as open if the
    /// service's sockets are not visible here. Fails if the service does not use TCP or the kernel does not answer.
    pub fn answer_socket_query(&self, query: &SocketQuery) -> anyhow::Result<SocketAnswer> {
        ensure!(
            query.service.protocol == TransportProtocol::Tcp,
            "sockets of {}: expected a service of TCP",
            query.service
        );
        let to_four_tuple = |client: &SocketAddr| FourTuple::new(*client, query.service.vip_and_port);
        let four_tuples: Vec<FourTuple> = query.clients.iter().map(to_four_tuple).collect::<Result<_, _>>()?;
        let are_open = match self.bpf_programs.forwards_syn_acks(&query.service) {
            true => vec![true; four_tuples.len()],
            false => query_open_sockets(&four_tuples).with_context(|| format!("sockets of {}", query.service))?,
        };
        Ok(query.to_answer(are_open))
    }

    /// Applies the `[dispatch]` section of the changed `config_file`, and logs that other changes need a restart. If
    /// this fails, for example because the kernel rejects a change, the previous state remains.
    pub fn reload_config(&mut self, config_file: &Path, config: AgentConfig) -> anyhow::Result<()> {
        if (AgentConfig { dispatch: self.config.dispatch.clone(), ..config.clone() }) != self.config {
            tracing::warn!(
                event = "restart-required",
                file = %config_file.display(),
                "the agent reloads only `[dispatch]`: restart the agent to apply the other changed keys"
            );
        }
        match (&self.dispatcher, &config.dispatch) {
            (Some(dispatcher), Some(dispatch_config)) if dispatcher.is_running() => {
                dispatcher.replace_config(dispatch_config.clone())?
            }
            (_, Some(dispatch_config)) => self.dispatcher = Some(DispatcherHandle::start(dispatch_config)?),
            (_, None) => self.stop_dispatch()?,
        }
        self.config.dispatch = config.dispatch;
        self.run_maintenance();
        Ok(())
    }

    /// Stops the dispatch of requests, so that the kernel selects the worker of each request again.
    fn stop_dispatch(&mut self) -> anyhow::Result<()> {
        self.dispatcher = None;
        self.config.dispatch.take().map_or(Ok(()), |dispatch_config| dispatcher::detach_services(&dispatch_config))
    }

    /// Restores the NIC's RSS at an orderly shutdown. While services are stamped, the BPF programs and
    /// net.ipv4.tcp_timestamps remain, because stamped connections would break without them.
    pub fn shut_down(mut self) -> anyhow::Result<()> {
        self.rss_manager.restore_original_settings(&mut self.saved_settings);
        self.on_rss_changed();
        if self.bpf_programs.has_services() {
            tracing::info!(
                event = "programs-kept",
                "the agent ends, but its BPF programs still stamp packets: `coreward agent --detach` removes them"
            );
            return Ok(());
        }
        self.detach_programs()
    }

    /// Removes the BPF programs and restores all settings. This breaks stamped connections.
    pub fn detach_programs(mut self) -> anyhow::Result<()> {
        self.stop_dispatch()?;
        self.rss_manager.restore_original_settings(&mut self.saved_settings);
        steering::end_all_steering(&self.config.pin_directory)?;
        decapsulation::detach_program(&self.config)?;
        timestamps::restore_timestamps_sysctl(&mut self.saved_settings)?;
        self.bpf_programs.detach_and_unpin()?;
        self.saved_settings.remove_pinned_map()?;
        pins::remove_pin_directory_if_empty(&self.config.pin_directory)
    }
}

/// Returns whether the servers stamp at least one service, which requires TCP timestamps without a random offset per
/// connection.
fn has_stamped_services(configuration: &AgentConfiguration) -> bool {
    configuration.services.iter().any(|service| service.settings.servers_stamp_packets())
}

/// Returns whether the servers stamp new connections. They do not during a handover to another load balancer.
fn stamps_new_connections(configuration: &AgentConfiguration) -> bool {
    configuration.services.iter().any(|service| service.settings.servers_stamp_new_connections())
}

fn read_handshake_counters(bpf_programs: &ServerPrograms) -> HandshakeCounters {
    let counters = bpf_programs.counters();
    HandshakeCounters {
        handshake_count: counters[intf::SERVER_COUNTER_HANDSHAKE as usize],
        stalled_handshake_count: counters[intf::SERVER_COUNTER_HANDSHAKE_STALLED as usize],
        stalled_connection_count: counters[intf::SERVER_COUNTER_CONNECTION_STALLED as usize],
    }
}

/// Returns the number of SYN-ACKs that were not stamped because their socket is in another network namespace.
fn unstamped_syn_ack_count(bpf_programs: &ServerPrograms) -> u64 {
    bpf_programs.counter(intf::SERVER_COUNTER_EGRESS_FOREIGN_CLOCK)
}
