//! The file of `coreward orchestrate`. Users find its reference in docs/orchestrate.md.

use std::net::{SocketAddr, SocketAddrV4};
use std::num::NonZeroU16;
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::{
    AbsolutePath, BoundedDuration, BoundedInteger, HOUR_NS, InterfaceName, MILLISECOND_NS, PrintableName, SECOND_NS,
    Spanned, TomlReader, config_file, config_struct, string_enum,
};
use coreward_model::dispatch::{
    CoreRankRule, DispatchEligibilityRule, DispatchRateLimit, FirstEligibleOutConfig, MAX_SCHEDULED_SERVICES,
    MAX_SHARE_WEIGHT, RankLambda, SchedulingGroupConfig, SchedulingMemberRanking, SchedulingParameters,
    ServiceQueueConfig,
};
use coreward_runtime::SegmentServiceEntry;

use crate::classify::{PayloadPattern, RequestClassifier};
use crate::dispatch_engine::{DispatchEngineConfig, EngineServiceConfig};

#[derive(Debug, Clone)]
pub struct OrchestratorConfig {
    pub shared_memory_path: PathBuf,
    /// Listening addresses, each with the classifier for its requests.
    pub listeners: Vec<(SocketAddrV4, RequestClassifier)>,
    /// Interface at which AF_XDP receives requests, or `None` if only UDP sockets receive them.
    pub af_xdp_interface: Option<String>,
    pub engine_config: DispatchEngineConfig,
    /// Time for which the idle daemon sleeps between polls while cores have requests. With 0, it always polls.
    pub idle_sleep: Duration,
    pub metrics_address: Option<SocketAddr>,
}

/// Maximum length of a UDP payload over IPv4 in bytes.
const MAX_UDP_PAYLOAD_BYTES: u64 = 65_507;
/// Maximum time from a request's arrival to its deadline, which must fit into 32 bits as a number of nanoseconds.
const MAX_REQUEST_DEADLINE_NS: u64 = 4 * SECOND_NS;

config_struct! {
    /// Configuration file before its values are checked.
    pub struct UncheckedOrchestratorConfig {
        /// Path of the file with the memory that daemon and workers share, in a directory of the daemon's user.
        memory: AbsolutePath,
        /// Way in which requests are received: by sockets, or by AF_XDP and sockets.
        intake: Option<Spanned<RequestIntakeName>>,
        /// Interface at which AF_XDP receives requests.
        interface: Option<Spanned<InterfaceName>>,
        /// Number of cores that can have a worker.
        cores: BoundedInteger<1, 256>,
        /// Upper bound of a core's rank. A core whose rank reaches this bound gets no further requests.
        depth: BoundedInteger<1, 64> = BoundedInteger(4),
        /// Rule that determines how a core's outstanding requests count in its rank.
        policy: RankRuleName = RankRuleName(CoreRankRule::Ranked),
        /// Whether a service for which no core is eligible blocks the services after it.
        scheduler: EligibilityRuleName = EligibilityRuleName(DispatchEligibilityRule::FirstEligible),
        /// Rule that orders the groups, or the services if there are no groups.
        ranking: MemberRankingName = MemberRankingName(SchedulingMemberRanking::StrictPriority),
        /// Maximum number of requests that wait for a core.
        waiting: BoundedInteger<1, 65536> = BoundedInteger(4096),
        /// Maximum length of requests and responses in bytes.
        payload: BoundedInteger<1, MAX_UDP_PAYLOAD_BYTES> = BoundedInteger(1472),
        /// Time without a completed request after which a worker gets no further requests until it completes one.
        stall_after: BoundedDuration<MILLISECOND_NS, HOUR_NS> = BoundedDuration(Duration::from_millis(500)),
        /// Time for which the idle daemon sleeps between polls; with "0s", it always polls.
        sleep: BoundedDuration<0, MILLISECOND_NS> = BoundedDuration(Duration::from_micros(50)),
        /// Address at which metrics are served for Prometheus; without it, no metrics are served.
        metrics: Option<SocketAddr>,
        /// Groups of services that are ranked together.
        groups as "group": Vec<Spanned<ServiceGroupTable>>,
        /// Services whose requests the daemon dispatches to cores.
        services as "service": Spanned<Vec<Spanned<OrchestratedServiceTable>>>,
    }
}

config_struct! {
    struct ServiceGroupTable {
        /// Name of the group.
        name: PrintableName,
        /// Rule that orders the services of the group.
        ranking: MemberRankingName = MemberRankingName(SchedulingMemberRanking::StrictPriority),
        /// Priority of the group among all groups; 0 is the highest.
        priority: BoundedInteger<0, 63> = BoundedInteger(0),
        /// Weight of the group among all groups.
        weight: BoundedInteger<1, { MAX_SHARE_WEIGHT as u64 }> = BoundedInteger(1),
        /// Time from a request's arrival to its deadline.
        deadline: BoundedDuration<1, MAX_REQUEST_DEADLINE_NS> = BoundedDuration(Duration::from_millis(1)),
        /// Maximum number of requests that are dispatched per second.
        rate: Option<BoundedInteger<1, SECOND_NS>>,
        /// Burst size of the rate limit, which is the number of requests that may be dispatched at once in spite of the
        /// rate.
        burst: BoundedInteger<1, 65536> = BoundedInteger(1),
    }
}

config_struct! {
    struct OrchestratedServiceTable {
        /// Destination address and port of the service's requests.
        listen: SocketAddr,
        /// Pattern that the service's requests match. Without it, the service gets all requests to the address that
        /// match no other service.
        pattern as "match": Option<PayloadMatchTable>,
        /// Priority of the service, which selects the queue at each core; 0 is the highest.
        priority: BoundedInteger<0, 7> = BoundedInteger(0),
        /// Weight (0 to 1) with which a request of lower priority than the service counts in a core's rank.
        lambda: f64 = RankLambda::PAPER_VALUE.get(),
        /// Name of the service's group.
        group: Option<PrintableName>,
        /// Weight of the service in its group.
        weight: BoundedInteger<1, { MAX_SHARE_WEIGHT as u64 }> = BoundedInteger(1),
        /// Time from a request's arrival to its deadline.
        deadline: BoundedDuration<1, MAX_REQUEST_DEADLINE_NS> = BoundedDuration(Duration::from_millis(1)),
        /// Maximum number of requests that are dispatched per second.
        rate: Option<BoundedInteger<1, SECOND_NS>>,
        /// Burst size of the rate limit, which is the number of requests that may be dispatched at once in spite of the
        /// rate.
        burst: BoundedInteger<1, 65536> = BoundedInteger(1),
    }
}

config_struct! {
    struct PayloadMatchTable {
        /// Offset in the payload at which the number or text is expected.
        offset: BoundedInteger<0, 65500> = BoundedInteger(0),
        /// Number that a matching payload has at the offset.
        value: Option<u64>,
        /// Length of the number in bytes.
        bytes: BoundedInteger<1, 8> = BoundedInteger(1),
        /// Whether the number's first byte is the least significant.
        little_endian: bool = false,
        /// Text that a matching payload has at the offset, instead of a number.
        prefix: Option<String>,
    }
}

struct RequestIntakeName(RequestIntakeKind);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestIntakeKind {
    Socket,
    AfXdp,
}

string_enum!(
    RequestIntakeName,
    "intake",
    [
        ("socket".to_owned(), RequestIntakeName(RequestIntakeKind::Socket)),
        ("af-xdp".to_owned(), RequestIntakeName(RequestIntakeKind::AfXdp))
    ]
);

struct RankRuleName(CoreRankRule);

string_enum!(
    RankRuleName,
    "policy",
    [
        ("jbsrq".to_owned(), RankRuleName(CoreRankRule::Ranked)),
        ("global-jbsq".to_owned(), RankRuleName(CoreRankRule::Global)),
        ("per-service-jbsq".to_owned(), RankRuleName(CoreRankRule::PerService)),
    ]
);

struct EligibilityRuleName(DispatchEligibilityRule);

string_enum!(
    EligibilityRuleName,
    "scheduler",
    [
        ("feo".to_owned(), EligibilityRuleName(DispatchEligibilityRule::FirstEligible)),
        ("pifo".to_owned(), EligibilityRuleName(DispatchEligibilityRule::Pifo)),
    ]
);

struct MemberRankingName(SchedulingMemberRanking);

string_enum!(
    MemberRankingName,
    "ranking",
    [
        ("priority".to_owned(), MemberRankingName(SchedulingMemberRanking::StrictPriority)),
        ("share".to_owned(), MemberRankingName(SchedulingMemberRanking::WeightedShare)),
        ("deadline".to_owned(), MemberRankingName(SchedulingMemberRanking::EarliestDeadline)),
    ]
);

/// Services without mistakes, their scheduler queues in the same order, and the addresses at which the daemon listens.
struct CheckedServices {
    listeners: Vec<(SocketAddrV4, RequestClassifier)>,
    services: Vec<EngineServiceConfig>,
    queues: Vec<ServiceQueueConfig>,
}

config_file!(OrchestratorConfig, |table: UncheckedOrchestratorConfig, reader| table.into_checked_config(reader));

impl UncheckedOrchestratorConfig {
    fn into_checked_config(self, reader: &mut TomlReader<'_>) -> Option<OrchestratorConfig> {
        let service_count = self.services.get_ref().len();
        if !(1..=MAX_SCHEDULED_SERVICES).contains(&service_count) {
            reader.report_mistake(
                self.services.span(),
                format!("{service_count} services: expected 1 to {MAX_SCHEDULED_SERVICES}"),
            );
        }
        let group_configs = self.checked_group_configs(reader);
        let af_xdp_interface = self.checked_af_xdp_interface(reader);
        let CheckedServices { listeners, services, queues } =
            self.check_services(&group_configs, af_xdp_interface.is_some(), reader)?;
        let scheduler_config = FirstEligibleOutConfig {
            group_ranking: self.ranking.0,
            groups: group_configs,
            queues,
            eligibility_rule: self.scheduler.0,
            max_waiting_requests: self.waiting.0 as usize,
        };
        let engine_config = DispatchEngineConfig {
            core_count: self.cores.0 as u16,
            rank_bound: NonZeroU16::new(self.depth.0 as u16)?,
            rank_rule: self.policy.0,
            services,
            scheduler_config,
            max_payload_bytes: self.payload.0 as u16,
            stall_after: self.stall_after.0,
        };
        let (shared_memory_path, idle_sleep, metrics_address) = (self.memory.0, self.sleep.0, self.metrics);
        Some(OrchestratorConfig {
            shared_memory_path,
            listeners,
            af_xdp_interface,
            engine_config,
            idle_sleep,
            metrics_address,
        })
    }

    /// Checks the services, reports their mistakes, and returns the services without mistakes. Returns `None` if a
    /// service's group has no configuration.
    fn check_services(
        &self,
        group_configs: &[SchedulingGroupConfig],
        uses_af_xdp: bool,
        reader: &mut TomlReader<'_>,
    ) -> Option<CheckedServices> {
        let mut listeners: Vec<(SocketAddrV4, RequestClassifier)> = Vec::new();
        let (mut services, mut queues) = (Vec::new(), Vec::new());
        for (service_number, spanned_service) in self.services.get_ref().iter().enumerate() {
            let service_table = spanned_service.get_ref();
            let address = service_table.checked_listen_address(uses_af_xdp);
            let Some(address) = reader.ok_or_report(address, spanned_service.span()) else { continue };
            let Some(lambda) = reader.ok_or_report(service_table.checked_lambda(), spanned_service.span()) else {
                continue;
            };
            let Some(pattern) = reader.ok_or_report(service_table.parse_pattern(), spanned_service.span()) else {
                continue;
            };
            let Some(group) = reader.ok_or_report(self.group_index(service_table), spanned_service.span()) else {
                continue;
            };
            let listener_index = listeners.iter().position(|(listen, _)| *listen == address).unwrap_or_else(|| {
                listeners.push((address, RequestClassifier::default()));
                listeners.len() - 1
            });
            listeners[listener_index].1.services_and_patterns.push((service_number as u8, pattern));
            let priority = service_table.priority.0 as u8;
            services.push(EngineServiceConfig { service_entry: SegmentServiceEntry { address, priority }, lambda });
            let scheduling_parameters =
                service_table.scheduling_parameters(group_configs.get(usize::from(group))?.service_ranking);
            queues.push(ServiceQueueConfig {
                group_index: group,
                parameters: scheduling_parameters,
                drop_priority: priority,
            });
        }
        Some(CheckedServices { listeners, services, queues })
    }

    fn checked_af_xdp_interface(&self, reader: &mut TomlReader<'_>) -> Option<String> {
        let af_xdp_intake = self.intake.as_ref().filter(|intake| intake.get_ref().0 == RequestIntakeKind::AfXdp);
        match (af_xdp_intake, &self.interface) {
            (Some(intake), None) => {
                let mistake =
                    "intake = \"af-xdp\" without `interface`: expected the interface at which requests arrive";
                reader.report_mistake(intake.span(), mistake.to_owned());
                None
            }
            (None, Some(interface)) => {
                let mistake = "interface without intake = \"af-xdp\": expected both or neither";
                reader.report_mistake(interface.span(), mistake.to_owned());
                None
            }
            (Some(_), Some(interface)) => Some(interface.get_ref().0.clone()),
            (None, None) => None,
        }
    }

    /// Returns the configuration of each service group. If the file has no group, all services form one.
    fn checked_group_configs(&self, reader: &mut TomlReader<'_>) -> Vec<SchedulingGroupConfig> {
        if self.groups.is_empty() {
            return vec![SchedulingGroupConfig {
                parameters: SchedulingParameters::new(1),
                service_ranking: self.ranking.0,
            }];
        }
        for (group_number, spanned_group) in self.groups.iter().enumerate() {
            let group_name = &spanned_group.get_ref().name;
            if self.groups[..group_number].iter().any(|other| other.get_ref().name == *group_name) {
                reader.report_mistake(
                    spanned_group.span(),
                    format!("group {:?} is listed twice: expected each once", group_name.0),
                );
            }
        }
        if let Some(first_excess_group) = self.groups.get(MAX_SCHEDULED_SERVICES) {
            reader.report_mistake(
                first_excess_group.span(),
                format!("{} groups: expected at most {MAX_SCHEDULED_SERVICES}", self.groups.len()),
            );
        }
        let to_group_config = |group: &Spanned<ServiceGroupTable>| {
            let ServiceGroupTable { ranking, priority, weight, deadline, rate, burst, .. } = group.get_ref();
            let ranking_parameter = priority_weight_or_deadline(self.ranking.0, priority.0, weight.0, deadline.0);
            SchedulingGroupConfig {
                parameters: SchedulingParameters {
                    priority_weight_or_deadline: ranking_parameter,
                    rate_limit: rate_limit_from_config(rate.as_ref(), *burst),
                },
                service_ranking: ranking.0,
            }
        };
        self.groups.iter().map(to_group_config).collect()
    }

    fn group_index(&self, service: &OrchestratedServiceTable) -> Result<u8, String> {
        match (&service.group, self.groups.is_empty()) {
            (None, true) => Ok(0),
            (None, false) => Err("a service without `group`: expected the name of a [[group]]".to_owned()),
            (Some(name), _) => {
                let group_position = self.groups.iter().position(|group| group.get_ref().name == *name);
                group_position.map(|group| group as u8).ok_or_else(|| format!("no [[group]] has the name {:?}", name.0))
            }
        }
    }
}

fn priority_weight_or_deadline(
    ranking: SchedulingMemberRanking,
    priority: u64,
    weight: u64,
    deadline: Duration,
) -> u32 {
    match ranking {
        SchedulingMemberRanking::StrictPriority => priority as u32,
        SchedulingMemberRanking::WeightedShare => weight as u32,
        SchedulingMemberRanking::EarliestDeadline => deadline.as_nanos() as u32,
    }
}

fn rate_limit_from_config(
    rate: Option<&BoundedInteger<1, SECOND_NS>>,
    burst: BoundedInteger<1, 65536>,
) -> Option<DispatchRateLimit> {
    rate.map(|rate| DispatchRateLimit { token_interval: SECOND_NS / rate.0, burst_tokens: burst.0 as u32 })
}

impl OrchestratedServiceTable {
    fn scheduling_parameters(&self, ranking: SchedulingMemberRanking) -> SchedulingParameters {
        let ranking_parameter = priority_weight_or_deadline(ranking, self.priority.0, self.weight.0, self.deadline.0);
        SchedulingParameters {
            priority_weight_or_deadline: ranking_parameter,
            rate_limit: rate_limit_from_config(self.rate.as_ref(), self.burst),
        }
    }

    fn checked_listen_address(&self, uses_af_xdp: bool) -> Result<SocketAddrV4, String> {
        match self.listen {
            SocketAddr::V4(address) if uses_af_xdp && address.ip().is_unspecified() => {
                Err(format!("listen {address} with intake = \"af-xdp\": expected the address to which requests go"))
            }
            SocketAddr::V4(address) if address.port() != 0 => Ok(address),
            other => Err(format!("listen {other}: expected an IPv4 address and a port from 1 to 65535")),
        }
    }

    fn checked_lambda(&self) -> Result<RankLambda, String> {
        RankLambda::new(self.lambda).map_err(|error| error.to_string())
    }

    fn parse_pattern(&self) -> Result<Option<PayloadPattern>, String> {
        let Some(pattern) = &self.pattern else { return Ok(None) };
        let number_length = pattern.bytes.0 as usize;
        let pattern_bytes = match (pattern.value, &pattern.prefix) {
            (Some(value), None) if number_length < 8 && value >> (8 * number_length) != 0 => {
                return Err(format!("value = {value}: expected a number of {number_length} bytes"));
            }
            (Some(value), None) if pattern.little_endian => value.to_le_bytes()[..number_length].to_vec(),
            (Some(value), None) => value.to_be_bytes()[8 - number_length..].to_vec(),
            (None, Some(prefix)) if !prefix.is_empty() => prefix.as_bytes().to_vec(),
            _ => return Err("match: expected either `value` or `prefix`".to_owned()),
        };
        Ok(Some(PayloadPattern { byte_offset: pattern.offset.0 as usize, expected_bytes: pattern_bytes }))
    }
}
