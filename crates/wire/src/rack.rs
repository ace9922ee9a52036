//! Messages between the controller and racks.

use std::collections::HashSet;
use std::time::Duration;

use coreward_model::ServerId;
use coreward_model::load::{MAX_ACCEPTED_CORE_LOAD, SmoothingWeight};
use coreward_model::placement::{BucketCount, ServerCore};
use coreward_model::policy::{
    BucketCandidateList, LoadHistogram, LoadHistogramBin, LoadHistogramBins, MAX_CANDIDATES, RackSummary,
    ServerCapacity, ServerLoadClass, ServerLoads, ServerWeight, SummarizedServer,
};
use prost::Message as _;

use crate::address::parse_server_id;
use crate::report::MAX_REPORTED_CORES;
use crate::rss::parse_rss_key;
use crate::{ServiceIndex, WireError, WireErrorContext as _, packed_numbers, v1};

/// Maximum number of cores in a histogram bin, which is more than any rack has. No load is above 16 (the model's
/// `MAX_ACCEPTED_CORE_LOAD`). Load sums over a thousand racks, in units of 2^-32, therefore fit into 64 bits.
const MAX_CORES_PER_LOAD_BIN: u64 = 1 << 18;
/// Maximum load of a core in units of 2^-32 cores, in which load sums are counted.
const MAX_CORE_LOAD_FIXED_POINT: u64 = (MAX_ACCEPTED_CORE_LOAD as u64) << 32;

/// Maximum size in bytes of a rack message, which is half of a controller's limit. A single summary has about 200 kB
/// for 2,048 buckets with 8 candidates each and one RSS key.
const MAX_RACK_MESSAGE_BYTES: usize = 2 << 20;

/// Configuration of a rack controller, with the rack's servers and their services.
#[derive(Debug, Clone, PartialEq)]
pub struct RackConfiguration {
    /// Time between two summaries of the rack.
    pub report_interval: Duration,
    /// Minimum interval between an agent's full reports. Reports are sent earlier if the server drains, or if its
    /// warnings, RSS or active configuration change.
    pub detail_interval: Duration,
    /// Weight of the newest report in a core's smoothed load.
    pub load_ewma_alpha: SmoothingWeight,
    /// Servers whose agents are connected through the rack controller.
    pub servers: Vec<RackServer>,
    /// Services to which at least one of the rack's servers belongs.
    pub services: Vec<RackService>,
}

/// Server whose agent is connected through a rack controller.
#[derive(Debug, Clone, PartialEq)]
pub struct RackServer {
    /// Number of the agent's stream, which identifies the agent in rack messages.
    pub stream_number: u64,
    /// Id of the server.
    pub id: ServerId,
    /// Weight of the server.
    pub weight: ServerWeight,
    /// Capacity of the server, or `None` to use the number of its cores.
    pub capacity: Option<ServerCapacity>,
}

/// Service in a rack controller's configuration.
#[derive(Debug, Clone, PartialEq)]
pub struct RackService {
    /// Index of the service.
    pub index: ServiceIndex,
    /// Name of the service's placement policy, which may be unknown to a rack controller of an older version.
    pub policy_name: String,
    /// Number of buckets in the service's placement tables.
    pub bucket_count: BucketCount,
    /// Whether each datagram to the service is placed independently.
    pub places_each_datagram: bool,
    /// Servers of the rack that belong to the service.
    pub members: Vec<RackMember>,
}

/// Server of the rack as a member of a service.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RackMember {
    /// Id of the server.
    pub id: ServerId,
    /// Whether the server takes new connections.
    pub is_eligible: bool,
    /// Whether the server gets its full share, because it is not in slow start.
    pub has_full_share: bool,
}

impl From<&RackConfiguration> for v1::RackConfiguration {
    fn from(configuration: &RackConfiguration) -> Self {
        let to_server_message = |server: &RackServer| v1::RackServer {
            stream: server.stream_number,
            id: server.id.get().into(),
            weight: server.weight.get(),
            capacity: server.capacity.map_or(0.0, ServerCapacity::get),
        };
        let to_service_message = |service: &RackService| v1::RackService {
            index: service.index.get().into(),
            policy: service.policy_name.clone(),
            bucket_count: service.bucket_count.get(),
            places_requests: service.places_each_datagram,
            server_id: service.members.iter().map(|member| member.id.get().into()).collect(),
            eligible: service.members.iter().map(|member| member.is_eligible).collect(),
            has_full_share: service.members.iter().map(|member| member.has_full_share).collect(),
        };
        Self {
            report_interval_ms: configuration.report_interval.as_millis() as u32,
            detail_interval_ms: configuration.detail_interval.as_millis() as u32,
            alpha: configuration.load_ewma_alpha.get(),
            servers: configuration.servers.iter().map(to_server_message).collect(),
            services: configuration.services.iter().map(to_service_message).collect(),
        }
    }
}

impl TryFrom<&v1::RackConfiguration> for RackConfiguration {
    type Error = WireError;

    fn try_from(message: &v1::RackConfiguration) -> Result<Self, WireError> {
        if message.report_interval_ms == 0 {
            return Err(WireError::new("report_interval_ms", "0: expected at least 1"));
        }
        Ok(Self {
            report_interval: Duration::from_millis(message.report_interval_ms.into()),
            detail_interval: Duration::from_millis(message.detail_interval_ms.into()),
            load_ewma_alpha: SmoothingWeight::new(message.alpha).map_err(|error| WireError::new("alpha", error))?,
            servers: message.servers.iter().map(parse_server).collect::<Result<_, _>>().with_field_prefix("servers")?,
            services: message
                .services
                .iter()
                .map(parse_service)
                .collect::<Result<_, _>>()
                .with_field_prefix("services")?,
        })
    }
}

/// Packs agents' messages and summaries into rack messages of limited size. Returns at least one message, because an
/// empty message shows that the rack controller is alive.
pub fn pack_into_rack_messages(agents: Vec<v1::FromAgent>, summaries: Vec<v1::RackSummary>) -> Vec<v1::RackMessage> {
    let mut packed_messages = PackedRackMessages { last_message_bytes: 0, messages: vec![v1::RackMessage::default()] };
    for agent in agents {
        packed_messages.message_with_room_for(agent.encoded_len()).agents.push(agent);
    }
    for summary in summaries {
        packed_messages.message_with_room_for(summary.encoded_len()).summaries.push(summary);
    }
    packed_messages.messages
}

struct PackedRackMessages {
    last_message_bytes: usize,
    messages: Vec<v1::RackMessage>,
}

impl PackedRackMessages {
    fn message_with_room_for(&mut self, added_bytes: usize) -> &mut v1::RackMessage {
        if self.last_message_bytes > 0 && self.last_message_bytes + added_bytes > MAX_RACK_MESSAGE_BYTES {
            self.messages.push(v1::RackMessage::default());
            self.last_message_bytes = 0;
        }
        self.last_message_bytes += added_bytes;
        self.messages.last_mut().expect("there is at least one")
    }
}

fn parse_server_weight(weight: u32) -> Result<ServerWeight, WireError> {
    ServerWeight::new(weight.into()).map_err(|error| WireError::new("weight", error))
}

fn parse_server(message: &v1::RackServer) -> Result<RackServer, WireError> {
    let capacity = (message.capacity != 0.0).then(|| ServerCapacity::new(message.capacity)).transpose();
    Ok(RackServer {
        stream_number: message.stream,
        id: parse_server_id("id", message.id)?,
        weight: parse_server_weight(message.weight)?,
        capacity: capacity.map_err(|error| WireError::new("capacity", error))?,
    })
}

fn parse_service(message: &v1::RackService) -> Result<RackService, WireError> {
    let server_count = message.server_id.len();
    check_length("eligible", message.eligible.len(), server_count)?;
    check_length("has_full_share", message.has_full_share.len(), server_count)?;
    let parse_member = |position: usize| {
        Ok(RackMember {
            id: parse_server_id("server_id", message.server_id[position])?,
            is_eligible: message.eligible[position],
            has_full_share: message.has_full_share[position],
        })
    };
    Ok(RackService {
        index: ServiceIndex::parse("index", message.index)?,
        policy_name: message.policy.clone(),
        bucket_count: BucketCount::new(message.bucket_count.into())
            .map_err(|error| WireError::new("bucket_count", error))?,
        places_each_datagram: message.places_requests,
        members: (0..server_count).map(parse_member).collect::<Result<_, WireError>>()?,
    })
}

/// Returns the protocol message with the rack's summary for a service.
pub fn encode_summary(service: ServiceIndex, summary: &RackSummary) -> v1::RackSummary {
    let mut message = v1::RackSummary { service_index: service.get().into(), ..Default::default() };
    let position_of_server =
        |id: ServerId| summary.servers.binary_search_by_key(&id, |server| server.id).expect("a server of the summary");
    for server in &summary.servers {
        let id = u32::from(server.id.get());
        message.server_id.push(id);
        message.cores.push(server.loads.core_count());
        message.load_sum.push(server.loads.load_sum());
        if let Some(cores) = server.loads.core_loads() {
            message.slow_start.push(v1::CoreLoads { server_id: id, load: cores.to_vec() });
        }
    }
    let to_load_spread = |(class, bins): &(ServerLoadClass, LoadHistogramBins)| v1::LoadSpread {
        weight: class.weight.get(),
        speed: class.relative_core_speed,
        bin: packed_numbers::encode_integers(bins.iter().map(|(bin, _)| u64::from(*bin))),
        cores: packed_numbers::encode_integers(bins.iter().map(|(_, bin)| bin.core_count)),
        sum: packed_numbers::encode_integers(bins.iter().map(|(_, bin)| bin.load_sum)),
    };
    message.spreads = summary.histograms_by_class.iter().map(to_load_spread).collect();
    let to_candidate_list = |list: &BucketCandidateList| v1::CandidateList {
        key: list.key.key_bytes().to_vec().into(),
        input_transform: list.key.input_transform().ethtool_number().into(),
        per_bucket: list.candidates_per_bucket as u32,
        server: packed_numbers::encode_integers(
            list.candidates.iter().map(|(core, _)| position_of_server(core.server) as u64),
        ),
        core: packed_numbers::encode_integers(list.candidates.iter().map(|(core, _)| u64::from(core.core))),
        load: packed_numbers::encode_doubles(list.candidates.iter().map(|(_, load)| *load)),
    };
    message.lists = summary.candidate_lists.iter().map(to_candidate_list).collect();
    message
}

/// Parses a rack summary and the index of its service. An error has the invalid field and the expected values.
pub fn parse_rack_summary(message: &v1::RackSummary) -> Result<(ServiceIndex, RackSummary), WireError> {
    let service = ServiceIndex::parse("service_index", message.service_index)?;
    let mut servers = parse_servers(message)?;
    for loads in &message.slow_start {
        let id = parse_server_id("slow_start.server_id", loads.server_id)?;
        let unknown_server_error =
            || WireError::new("slow_start.server_id", format!("{id}: expected one of `server_id`"));
        let position = servers.binary_search_by_key(&id, |server| server.id).map_err(|_| unknown_server_error())?;
        loads.load.iter().try_for_each(|load| check_core_load("slow_start.load", *load))?;
        check_length("slow_start.load", loads.load.len(), message.cores[position] as usize)?;
        servers[position].loads = ServerLoads::Relayed(loads.load.clone().into());
    }
    let histograms_by_class: Vec<_> =
        message.spreads.iter().map(parse_load_spread).collect::<Result<_, _>>().with_field_prefix("spreads")?;
    let mut used_classes = HashSet::new();
    if !histograms_by_class
        .iter()
        .all(|(class, _)| used_classes.insert((class.weight.get(), class.relative_core_speed.to_bits())))
    {
        return Err(WireError::new("spreads", "two of one weight and speed: expected one"));
    }
    let server_ids: Vec<ServerId> = servers.iter().map(|server| server.id).collect();
    let parse_list_of_candidates = |list: &v1::CandidateList| parse_candidate_list(list, &server_ids);
    let candidate_lists =
        message.lists.iter().map(parse_list_of_candidates).collect::<Result<_, _>>().with_field_prefix("lists")?;
    Ok((service, RackSummary { servers, histograms_by_class, candidate_lists }))
}

fn parse_servers(message: &v1::RackSummary) -> Result<Vec<SummarizedServer>, WireError> {
    let server_count = message.server_id.len();
    check_length("cores", message.cores.len(), server_count)?;
    check_length("load_sum", message.load_sum.len(), server_count)?;
    if !message.server_id.is_sorted_by(|id, next_id| id < next_id) {
        return Err(WireError::new("server_id", "not in ascending order"));
    }
    let server_fields = message.server_id.iter().zip(&message.cores).zip(&message.load_sum);
    let parse_summarized_server = |((id, cores), sum): ((&u32, &u32), &f64)| {
        if !(1..=MAX_REPORTED_CORES as u32).contains(cores) {
            return Err(WireError::new("cores", format!("{cores}: expected 1 to {MAX_REPORTED_CORES}")));
        }
        check_total_load("load_sum", *sum, *cores)?;
        let loads = ServerLoads::Aggregated { sum: *sum, core_count: *cores };
        Ok(SummarizedServer { id: parse_server_id("server_id", *id)?, loads })
    };
    server_fields.map(parse_summarized_server).collect()
}

fn parse_load_spread(message: &v1::LoadSpread) -> Result<(ServerLoadClass, LoadHistogramBins), WireError> {
    let bin_count = packed_numbers::count_integers(&message.bin);
    check_length("cores", packed_numbers::count_integers(&message.cores), bin_count)?;
    check_length("sum", packed_numbers::count_integers(&message.sum), bin_count)?;
    if !(message.speed.is_finite() && message.speed > 0.0) {
        return Err(WireError::new("speed", format!("{}: expected a number above 0", message.speed)));
    }
    let class = ServerLoadClass { weight: parse_server_weight(message.weight)?, relative_core_speed: message.speed };
    let mut bins = LoadHistogramBins::with_capacity(bin_count);
    let bin_fields = packed_numbers::decode_integers(&message.bin)
        .zip(packed_numbers::decode_integers(&message.cores))
        .zip(packed_numbers::decode_integers(&message.sum));
    for ((bin, core_count), sum) in bin_fields {
        let (Some(bin), Some(core_count), Some(sum)) = (bin, core_count, sum) else {
            return Err(packed_numbers::invalid_integer_error("bin, cores, sum"));
        };
        let out_of_range = || WireError::new("bin", format!("{bin}: expected 0 to {}", LoadHistogram::BIN_COUNT - 1));
        let bin = u16::try_from(bin).ok().filter(|bin| *bin < LoadHistogram::BIN_COUNT).ok_or_else(out_of_range)?;
        let max_load_sum = core_count.saturating_mul(MAX_CORE_LOAD_FIXED_POINT);
        if core_count > MAX_CORES_PER_LOAD_BIN || sum > max_load_sum {
            let problem = format!(
                "{core_count} cores with a sum of {sum}: expected at most {MAX_CORES_PER_LOAD_BIN}, and of \
                 {max_load_sum}"
            );
            return Err(WireError::new("cores", problem));
        }
        if bins.last().is_some_and(|(last, _)| *last >= bin) {
            return Err(WireError::new("bin", "not in ascending order"));
        }
        bins.push((bin, LoadHistogramBin { core_count, load_sum: sum }));
    }
    Ok((class, bins))
}

/// Parses a candidate list whose servers are `server_ids`. This is a hot path, because each message has thousands of
/// candidates.
fn parse_candidate_list(
    message: &v1::CandidateList,
    server_ids: &[ServerId],
) -> Result<BucketCandidateList, WireError> {
    let candidate_count = packed_numbers::count_integers(&message.server);
    check_length("core", packed_numbers::count_integers(&message.core), candidate_count)?;
    check_length("load", packed_numbers::count_doubles("load", &message.load)?, candidate_count)?;
    if !(1..=u32::from(MAX_CANDIDATES)).contains(&message.per_bucket) {
        let problem = format!("{}: expected 1 to {MAX_CANDIDATES}", message.per_bucket);
        return Err(WireError::new("per_bucket", problem));
    }
    let server_cores =
        packed_numbers::decode_integers(&message.server).zip(packed_numbers::decode_integers(&message.core));
    packed_numbers::decode_doubles(&message.load).try_for_each(|load| check_core_load("load", load))?;
    let mut candidates = Vec::with_capacity(candidate_count);
    for ((server, core), load) in server_cores.zip(packed_numbers::decode_doubles(&message.load)) {
        let (Some(server), Some(core)) = (server, core) else {
            return Err(packed_numbers::invalid_integer_error("server, core"));
        };
        let Some(id) = usize::try_from(server).ok().and_then(|position| server_ids.get(position)) else {
            return Err(WireError::new("server", format!("{server}: expected a position below {}", server_ids.len())));
        };
        let Ok(core) = u16::try_from(core) else {
            return Err(WireError::new("core", format!("{core}: expected below 65536")));
        };
        candidates.push((ServerCore { server: *id, core }, load));
    }
    let key = parse_rss_key(&message.key, message.input_transform)?;
    Ok(BucketCandidateList { key, candidates_per_bucket: message.per_bucket as usize, candidates })
}

fn check_core_load(field: &str, load: f64) -> Result<(), WireError> {
    check_total_load(field, load, 1)
}

fn check_total_load(field: &str, load: f64, cores: u32) -> Result<(), WireError> {
    let max_load = MAX_ACCEPTED_CORE_LOAD * f64::from(cores);
    // Smoothing may round a load up.
    if (0.0..=max_load * 1.000_001).contains(&load) {
        return Ok(());
    }
    Err(WireError::new(field, format!("{load}: expected a number from 0 to {max_load}")))
}

fn check_length(field: &str, length: usize, expected_length: usize) -> Result<(), WireError> {
    if length == expected_length {
        return Ok(());
    }
    Err(WireError::new(field, format!("{length} entries: expected {expected_length}")))
}

#[cfg(test)]
mod tests {
    use coreward_model::policy::{PoolServer, ServerPool, create_policy_by_name};
    use coreward_model::rss::{IndirectionTable, RssConfig};
    use prost::bytes::Bytes;

    use coreward_model::rss::RssKey;

    use super::*;

    fn sample_summary() -> RackSummary {
        let sample_pool_server = |n: u64| PoolServer {
            loads: Some(vec![n as f64 / 10.0; 4].into()),
            rss: Some(RssConfig {
                key: RssKey::microsoft_verification_key(),
                indirection_table: IndirectionTable::draw_balanced_entries(n, 128, 4).unwrap(),
            }),
            slow_start_fraction: if n == 2 { 0.5 } else { 1.0 },
            ..PoolServer::new((n * 31).try_into().unwrap())
        };
        let pool = ServerPool::new((0..5).map(sample_pool_server).collect(), 1);
        RackSummary::from_pool(
            &pool,
            create_policy_by_name("crossrss-plus", 1).unwrap().as_mut(),
            BucketCount::PAPER_VALUE,
            8,
        )
    }

    #[test]
    fn summaries_round_trip() {
        let service = ServiceIndex::new(3).unwrap();
        let summary = sample_summary();
        assert_eq!(summary.candidate_lists[0].candidates_per_bucket, 4);
        assert_eq!(parse_rack_summary(&encode_summary(service, &summary)), Ok((service, summary)));
    }

    #[test]
    fn large_summary_is_split_into_messages() {
        let message = encode_summary(ServiceIndex::new(3).unwrap(), &sample_summary());
        let (bytes, count) = (message.encoded_len(), 3 * MAX_RACK_MESSAGE_BYTES / message.encoded_len());
        let agent = v1::FromAgent { stream: 7, message: None };
        let messages = pack_into_rack_messages(vec![agent.clone()], vec![message.clone(); count]);
        assert!((3..=4).contains(&messages.len()), "{} of {bytes} bytes in {}", count, messages.len());
        assert!(messages.iter().all(|message| message.encoded_len() < 2 * MAX_RACK_MESSAGE_BYTES));
        assert_eq!(messages[0].agents, [agent]);
        assert_eq!(
            messages.into_iter().flat_map(|message| message.summaries).collect::<Vec<_>>(),
            vec![message; count]
        );
        assert_eq!(pack_into_rack_messages(vec![], vec![]), [v1::RackMessage::default()]);
    }

    fn replace_packed_number(numbers: &mut Bytes, position: usize, number: u64) {
        let mut all_numbers: Vec<u64> = packed_numbers::decode_integers(numbers).map(Option::unwrap).collect();
        all_numbers[position] = number;
        *numbers = packed_numbers::encode_integers(all_numbers.into_iter());
    }

    #[test]
    fn invalid_summaries_are_rejected() {
        let error_after_change = |change: fn(&mut v1::RackSummary)| {
            let mut message = encode_summary(ServiceIndex::new(0).unwrap(), &sample_summary());
            change(&mut message);
            parse_rack_summary(&message).unwrap_err().to_string()
        };
        assert_eq!(error_after_change(|m| m.server_id[1] = 500), "server_id: not in ascending order");
        assert_eq!(error_after_change(|m| m.load_sum[0] = f64::NAN), "load_sum: NaN: expected a number from 0 to 64");
        assert_eq!(error_after_change(|m| m.load_sum[0] = 65.0), "load_sum: 65: expected a number from 0 to 64");
        assert_eq!(error_after_change(|m| m.cores[0] = 4097), "cores: 4097: expected 1 to 4096");
        assert_eq!(
            error_after_change(|m| m.slow_start[0].server_id = 7),
            "slow_start.server_id: 7: expected one of `server_id`"
        );
        assert_eq!(error_after_change(|m| m.slow_start[0].load.truncate(3)), "slow_start.load: 3 entries: expected 4");
        assert_eq!(
            error_after_change(|m| replace_packed_number(&mut m.lists[0].server, 9, 5)),
            "lists.server: 5: expected a position below 5"
        );
        assert_eq!(
            error_after_change(|m| m.lists[0].load.truncate(9)),
            "lists.load: 9 bytes: expected 8 for each number"
        );
        assert_eq!(error_after_change(|m| m.lists[0].core.truncate(4)), "lists.core: 4 entries: expected 512");
        assert_eq!(
            error_after_change(|m| m.lists[0].load = vec![0xff; 512 * 8].into()),
            "lists.load: NaN: expected a number from 0 to 16"
        );
        assert_eq!(error_after_change(|m| m.lists[0].per_bucket = 9), "lists.per_bucket: 9: expected 1 to 8");
        assert_eq!(
            error_after_change(|m| replace_packed_number(&mut m.spreads[0].bin, 0, 5_000)),
            "spreads.bin: 5000: expected 0 to 2049"
        );
        assert_eq!(
            error_after_change(|m| replace_packed_number(&mut m.spreads[0].bin, 1, 0)),
            "spreads.bin: not in ascending order"
        );
        assert_eq!(
            error_after_change(|m| m.spreads.push(m.spreads[0].clone())),
            "spreads: two of one weight and speed: expected one"
        );
        assert_eq!(
            error_after_change(|m| replace_packed_number(&mut m.spreads[0].sum, 0, u64::MAX))
                .split(": expected")
                .next(),
            Some("spreads.cores: 4 cores with a sum of 18446744073709551615")
        );
        assert!(
            error_after_change(|m| replace_packed_number(&mut m.spreads[0].cores, 0, 1 << 40))
                .starts_with("spreads.cores: 1099511627776 cores")
        );
        assert_eq!(error_after_change(|m| m.spreads[0].speed = 0.0), "spreads.speed: 0: expected a number above 0");
    }

    #[test]
    fn configurations_round_trip() {
        let member =
            |id: u64, has_full_share| RackMember { id: id.try_into().unwrap(), is_eligible: true, has_full_share };
        let configuration = RackConfiguration {
            report_interval: Duration::from_millis(100),
            detail_interval: Duration::from_secs(2),
            load_ewma_alpha: SmoothingWeight::PAPER_VALUE,
            servers: vec![RackServer {
                stream_number: 4,
                id: 9u64.try_into().unwrap(),
                weight: ServerWeight::new(3).unwrap(),
                capacity: Some(ServerCapacity::new(2.5).unwrap()),
            }],
            services: vec![RackService {
                index: ServiceIndex::new(1).unwrap(),
                policy_name: "crossrss".to_owned(),
                bucket_count: BucketCount::PAPER_VALUE,
                places_each_datagram: false,
                members: vec![member(9, true), member(11, false)],
            }],
        };
        let message = v1::RackConfiguration::from(&configuration);
        assert_eq!(RackConfiguration::try_from(&message), Ok(configuration));
        let error = RackConfiguration::try_from(&v1::RackConfiguration { alpha: 0.0, ..message }).unwrap_err();
        assert_eq!(error.to_string(), "alpha: alpha 0: expected a number above 0, at most 1");
    }
}
