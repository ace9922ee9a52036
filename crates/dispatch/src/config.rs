//! The file of `coreward dispatch`, which is also `[dispatch]` in the agent's file. Users find its reference in
//! docs/dispatch.md.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use coreward_config::serde_json::Value;
use coreward_config::toml::de::DeValue;
use coreward_config::{
    AbsolutePath, BoundedDuration, BoundedInteger, FromToml, HOUR_NS, LocatedValue, Spanned, TomlReader, config_file,
    config_struct, string_enum,
};
use coreward_dataplane::dispatch::{
    self, DispatchOptions, DispatchPolicy, MAX_PRIORITY_CLASSES, MAX_REQUEST_TYPES, MAX_RESPONSE_TIMEOUT,
    MAX_WORKERS_PER_SERVICE, PayloadRequestType, RequestTimeouts, WORKER_QUEUE_POLL_INTERVAL,
};
use coreward_model::dispatch::{OutstandingBoundsByClass, RoundedServiceTime};

pub const DEFAULT_PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward/dispatch";

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatchConfig {
    /// Directory for the pinned programs and maps, in a BPF file system.
    pub pin_directory: PathBuf,
    /// Directory in a cgroup2 file system that contains all workers, or `None` for the file system's root.
    pub cgroup: Option<PathBuf>,
    /// Address at which `coreward dispatch` serves metrics, or `None` if it serves none.
    pub metrics: Option<SocketAddr>,
    pub services: Vec<DispatchServiceConfig>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DispatchServiceConfig {
    pub program_options: DispatchOptions,
    /// Response timeout and stall time. They are checked in user space and not by the BPF programs.
    pub user_space_timeouts: RequestTimeouts,
    /// Expected service time of each request type. The last element is for requests of no type. `None` means that the
    /// time is learned.
    pub expected_service_times: Vec<Option<Duration>>,
    /// Default bound on a worker's outstanding requests, from which
    /// [`DispatchServiceConfig::outstanding_bounds_by_class`] computes the bounds.
    default_outstanding_bound: u32,
    reserved_worker_count: u16,
    reserved_worker_outstanding_bound: u32,
    priority_class_count: u8,
}

impl DispatchServiceConfig {
    pub fn new(listen: SocketAddr, policy: DispatchPolicy) -> Self {
        Self {
            program_options: DispatchOptions {
                service_address: listen,
                policy,
                request_id_position: None,
                type_offset: 0,
                request_types: Vec::new(),
                default_priority_class: 0,
                measures_service_times: policy == DispatchPolicy::LightestQueue,
            },
            user_space_timeouts: RequestTimeouts::default(),
            expected_service_times: vec![None],
            default_outstanding_bound: DEFAULT_OUTSTANDING_REQUEST_BOUND,
            reserved_worker_count: DEFAULT_RESERVED_WORKERS,
            reserved_worker_outstanding_bound: 0,
            priority_class_count: 1,
        }
    }

    /// Returns the bounds on a worker's outstanding requests for each class, in a service with this number of workers.
    pub fn outstanding_bounds_by_class(&self, worker_count: u16) -> OutstandingBoundsByClass {
        OutstandingBoundsByClass::with_reserved_cores(
            worker_count,
            self.priority_class_count,
            self.reserved_worker_count,
            self.default_outstanding_bound,
            self.reserved_worker_outstanding_bound,
        )
    }
}

/// Default bound on each worker's outstanding requests, which is that of RingLeader (NSDI'23, Sect. 7.1).
const DEFAULT_OUTSTANDING_REQUEST_BOUND: u32 = 4;
/// Default number of reserved workers, if there are several classes.
const DEFAULT_RESERVED_WORKERS: u16 = 1;

config_struct! {
    /// Configuration that is not checked yet, from the file of `coreward dispatch` or a table in another daemon's file.
    pub struct UncheckedDispatchConfig {
        /// Directory for the pinned programs and maps, in a BPF file system.
        pin_directory: Option<AbsolutePath>,
        /// A directory of a cgroup2 file system in or below which all workers are; without it the file system's root.
        cgroup: Option<PathBuf>,
        /// Address and port of the metrics for Prometheus; without it none are served.
        metrics: Option<Spanned<SocketAddr>>,
        /// Services whose requests are dispatched to workers.
        services as "service": Spanned<Vec<DispatchServiceTable>>,
    }
}

/// Minimum response timeout in ns. A shorter one would have no effect, because timeouts are checked once per poll
/// interval.
const MIN_RESPONSE_TIMEOUT_NS: u64 = WORKER_QUEUE_POLL_INTERVAL.as_nanos() as u64;

config_struct! {
    struct DispatchServiceTable {
        /// Address and port that the sockets are bound to.
        listen: LocatedValue<SocketAddr>,
        /// Policy that selects the worker.
        policy: DispatchPolicyName = DispatchPolicyName(DispatchPolicy::ShortestQueue),
        /// Number of outstanding requests at which a worker gets more only if all workers are at their bound.
        bound: BoundedInteger<1, 65535> = BoundedInteger(DEFAULT_OUTSTANDING_REQUEST_BOUND.into()),
        /// Number of workers that are reserved for class 0.
        reserved: BoundedInteger<0, { MAX_WORKERS_PER_SERVICE as u64 - 1 }> =
            BoundedInteger(DEFAULT_RESERVED_WORKERS.into()),
        /// Number of outstanding requests up to which a reserved worker accepts other classes.
        reserved_bound: BoundedInteger<0, 65535> = BoundedInteger(0),
        /// Age at which a request that has left the queue without a response is given up.
        response_timeout: Option<BoundedDuration<MIN_RESPONSE_TIMEOUT_NS, { MAX_RESPONSE_TIMEOUT.as_nanos() as u64 }>>,
        /// Time without a response after which a worker with queued requests gets no further ones until it responds.
        stall_after: Option<BoundedDuration<MIN_RESPONSE_TIMEOUT_NS, HOUR_NS>>,
        /// Position of the request id, which the response repeats.
        request_id: Option<PayloadFieldTable>,
        /// Position of the number that identifies the request type. Without it, each type has a prefix.
        type_field: Option<PayloadFieldTable>,
        /// Properties of requests that match no type.
        other: OtherRequestTypesTable = OtherRequestTypesTable::default(),
        /// Types of requests. The first type that matches a request applies.
        types as "type": Vec<Spanned<RequestTypeTable>>,
    }
}

/// Maximum offset of a field in bytes, because no UDP payload is longer.
const MAX_TYPE_FIELD_OFFSET: u64 = 65_500;

config_struct! {
    struct PayloadFieldTable {
        /// Offset of the field in the payload, in bytes.
        offset: BoundedInteger<0, MAX_TYPE_FIELD_OFFSET>,
        /// Offset of the field in a response's payload, if it differs from that in a request.
        response_offset: Option<BoundedInteger<0, MAX_TYPE_FIELD_OFFSET>>,
        /// Length of the field in bytes.
        bytes: BoundedInteger<1, 8>,
        /// Whether the field's first byte is the least significant.
        little_endian: bool = false,
    }
}

type ExpectedServiceTime = BoundedDuration<1, { RoundedServiceTime::MAX.as_nanos() as u64 }>;
type PriorityClassNumber = BoundedInteger<0, { MAX_PRIORITY_CLASSES as u64 - 1 }>;

config_struct! {
    #[derive(Default)]
    struct OtherRequestTypesTable {
        /// Expected service time; without it, the service time is learned.
        expected: Option<ExpectedServiceTime>,
        /// Priority class; 0 is the highest.
        class: Option<PriorityClassNumber>,
    }
}

config_struct! {
    struct RequestTypeTable {
        /// Value of the service's `type_field` in requests of this type.
        value: Option<u64>,
        /// First 1 to 8 bytes of the payload in requests of this type.
        prefix: Option<String>,
        /// Expected service time; without it, the service time is learned.
        expected: Option<ExpectedServiceTime>,
        /// Priority class; 0 is the highest.
        class: PriorityClassNumber = BoundedInteger(0),
    }
}

struct DispatchPolicyName(DispatchPolicy);

string_enum!(
    DispatchPolicyName,
    "policy",
    DispatchPolicy::all().map(|policy| (policy.name().to_owned(), DispatchPolicyName(policy)))
);

config_file!(DispatchConfig, |table: UncheckedDispatchConfig, reader| Some(table.check(reader)));

/// Decodes a `[dispatch]` table in another daemon's configuration file.
impl FromToml for DispatchConfig {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut TomlReader<'_>) -> Option<Self> {
        let table = UncheckedDispatchConfig::read(value, reader)?;
        Some(reader.check_current_value(|reader| table.check_embedded(reader)))
    }

    fn describe_valid_values() -> String {
        UncheckedDispatchConfig::describe_valid_values()
    }

    fn schema() -> Value {
        UncheckedDispatchConfig::schema()
    }
}

impl UncheckedDispatchConfig {
    /// Checks a `[dispatch]` table in another daemon's file. It must not have `metrics`, because the other daemon
    /// serves them.
    fn check_embedded(self, reader: &mut TomlReader<'_>) -> DispatchConfig {
        if let Some(metrics) = &self.metrics {
            let metrics_address = metrics.get_ref();
            reader.report_mistake(
                metrics.span(),
                format!("{metrics_address}: expected `metrics` outside of this table: the daemon serves all"),
            );
        }
        self.check(reader)
    }

    /// Checks the configuration, and adds mistakes to the reader's list.
    pub fn check(self, reader: &mut TomlReader<'_>) -> DispatchConfig {
        let mut services: Vec<DispatchServiceConfig> = Vec::new();
        let services_span = self.services.span();
        for table in self.services.into_inner() {
            let listen_span = table.listen.span.clone();
            let Some(service) = table.check(reader) else { continue };
            let listen_address = service.program_options.service_address;
            if services.iter().any(|service| service.program_options.service_address == listen_address) {
                reader.report_mistake(listen_span, format!("{listen_address} is listed twice: expected each once"));
            }
            services.push(service);
        }
        if services.is_empty() && !reader.has_diagnostics() {
            reader.report_mistake(services_span, "no service: expected at least one [[service]]");
        }
        let pin_directory = self.pin_directory.map_or_else(|| DEFAULT_PIN_DIRECTORY.into(), |path| path.0);
        let metrics_address = self.metrics.map(|address| *address.get_ref());
        DispatchConfig { pin_directory, cgroup: self.cgroup, metrics: metrics_address, services }
    }
}

impl DispatchServiceTable {
    fn check(self, reader: &mut TomlReader<'_>) -> Option<DispatchServiceConfig> {
        let listen_address = self.listen.value;
        if listen_address.is_some_and(|listen| listen.port() == 0) {
            let message = format!("{}: expected a port from 1 to 65535", listen_address?);
            reader.report_mistake(self.listen.span.clone(), message);
        }
        // Without an address there is no service. The check goes on with another address, because the types may have
        // mistakes, too.
        let mut service =
            DispatchServiceConfig::new(listen_address.unwrap_or_else(|| ([0, 0, 0, 0], 1).into()), self.policy.0);
        service.default_outstanding_bound = self.bound.0 as u32;
        service.reserved_worker_count = self.reserved.0 as u16;
        service.reserved_worker_outstanding_bound = self.reserved_bound.0 as u32;
        if let Some(BoundedDuration(timeout)) = self.response_timeout {
            service.user_space_timeouts.response_timeout = timeout;
        }
        if let Some(BoundedDuration(time)) = self.stall_after {
            service.user_space_timeouts.stall_after = time;
        }
        service.program_options.request_id_position = self.request_id.as_ref().map(|field| {
            let response_offset = field.response_offset.unwrap_or(field.offset);
            let [offset, response_offset] = [field.offset, response_offset].map(|offset| offset.0 as u16);
            dispatch::RequestIdPosition {
                offset_in_request: offset,
                offset_in_response: response_offset,
                byte_count: field.bytes.0 as u8,
            }
        });
        self.add_request_types(&mut service, reader);
        listen_address.map(|_| service)
    }

    fn add_request_types(&self, service: &mut DispatchServiceConfig, reader: &mut TomlReader<'_>) {
        if let Some(first_excess_type) = self.types.get(MAX_REQUEST_TYPES) {
            let message = format!("{} types: expected at most {MAX_REQUEST_TYPES}", self.types.len());
            reader.report_mistake(first_excess_type.span(), message);
        }
        service.program_options.type_offset = self.type_field.as_ref().map_or(0, |field| field.offset.0 as u16);
        service.expected_service_times.clear();
        for spanned_type in &self.types {
            let request_type = spanned_type.get_ref();
            let value_and_mask = request_type_pattern_and_mask(request_type, self.type_field.as_ref());
            let Some((value, mask)) = reader.ok_or_report(value_and_mask, spanned_type.span()) else { continue };
            service.program_options.request_types.push(PayloadRequestType {
                payload_value: value,
                payload_mask: mask,
                priority_class: request_type.class.0 as u8,
            });
            service.expected_service_times.push(request_type.expected.map(|BoundedDuration(time)| time));
        }
        let lowest_priority_class = service
            .program_options
            .request_types
            .iter()
            .map(|request_type| request_type.priority_class)
            .max()
            .unwrap_or(0);
        // Unless `other` has a class, requests that match no type have the lowest priority.
        service.program_options.default_priority_class =
            self.other.class.map_or(lowest_priority_class, |class| class.0 as u8);
        service.expected_service_times.push(self.other.expected.map(|BoundedDuration(time)| time));
        service.priority_class_count = lowest_priority_class.max(service.program_options.default_priority_class) + 1;
        service.program_options.measures_service_times = service.program_options.policy
            == DispatchPolicy::LightestQueue
            && service.expected_service_times.iter().any(Option::is_none);
    }
}

type PayloadFieldBytes = [u8; 8];

/// Returns the bytes that identify a request type, and the mask of the bits that must match.
fn request_type_pattern_and_mask(
    request_type: &RequestTypeTable,
    type_field: Option<&PayloadFieldTable>,
) -> Result<(PayloadFieldBytes, PayloadFieldBytes), String> {
    let (mut value, mut mask) = (PayloadFieldBytes::default(), PayloadFieldBytes::default());
    match (request_type.value, &request_type.prefix, type_field) {
        (Some(number), None, Some(field)) => {
            let field_length = field.bytes.0 as usize;
            if field_length < 8 && number >> (field_length * 8) != 0 {
                return Err(format!("value = {number}: expected a number of {field_length} bytes, as in `type_field`"));
            }
            if field.little_endian {
                value[..field_length].copy_from_slice(&number.to_le_bytes()[..field_length]);
            } else {
                value[..field_length].copy_from_slice(&number.to_be_bytes()[8 - field_length..]);
            }
            mask[..field_length].fill(0xff);
        }
        (None, Some(prefix), None) => {
            let prefix_bytes = prefix.as_bytes();
            if prefix_bytes.is_empty() || prefix_bytes.len() > value.len() {
                return Err(format!("prefix = {prefix:?}: expected 1 to {} bytes", value.len()));
            }
            value[..prefix_bytes.len()].copy_from_slice(prefix_bytes);
            mask[..prefix_bytes.len()].fill(0xff);
        }
        _ => {
            return Err(
                "a type: expected `value` if the service has a `type_field`, `prefix` if it has none".to_owned()
            );
        }
    }
    Ok((value, mask))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use coreward_config::TomlSource;

    use super::*;

    fn parse_dispatch_config(text: &str) -> Result<DispatchConfig, String> {
        DispatchConfig::parse(&TomlSource::from_text("dispatch.toml", text)).map_err(|mistakes| mistakes.to_string())
    }

    const DNS_SERVICE_CONFIG: &str = "[[service]]\nlisten = \"0.0.0.0:53\"\n";

    #[test]
    fn listen_address_alone_is_a_valid_dispatch_configuration() {
        let config = parse_dispatch_config(DNS_SERVICE_CONFIG).unwrap();
        assert_eq!(config.pin_directory, Path::new(DEFAULT_PIN_DIRECTORY));
        assert_eq!(
            config.services,
            [DispatchServiceConfig::new("0.0.0.0:53".parse().unwrap(), DispatchPolicy::ShortestQueue)]
        );
        assert_eq!(config.services[0].outstanding_bounds_by_class(3).core_bounds_for_class(0), [4, 4, 4]);
    }

    const TYPED_SERVICES_CONFIG: &str = r#"
[[service]]
listen = "10.0.0.1:4000"
policy = "jlq"
type_field = { offset = 3, bytes = 2 }
request_id = { offset = 0, bytes = 2, response_offset = 4 }
other = { expected = "7.5us" }
[[service.type]]
value = 258
expected = "100us"
[[service]]
listen = "10.0.0.1:4001"
policy = "jbsrq"
reserved = 1
bound = 2
[[service.type]]
prefix = "get "
[[service.type]]
prefix = "scan"
class = 1
"#;

    #[test]
    fn request_types_match_numbers_and_prefixes() {
        let config = parse_dispatch_config(TYPED_SERVICES_CONFIG).unwrap();
        let [first, second] = &config.services[..] else { panic!("{config:?}") };
        assert_eq!((first.program_options.type_offset, first.program_options.measures_service_times), (3, false));
        assert_eq!(first.program_options.request_types[0].payload_value, [1, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(first.program_options.request_types[0].payload_mask, [255, 255, 0, 0, 0, 0, 0, 0]);
        assert_eq!(first.expected_service_times, [Some(Duration::from_micros(100)), Some(Duration::from_nanos(7500))]);
        let id = dispatch::RequestIdPosition { offset_in_request: 0, offset_in_response: 4, byte_count: 2 };
        assert_eq!(first.program_options.request_id_position, Some(id));
        assert_eq!(&second.program_options.request_types[0].payload_value, b"get \0\0\0\0");
        assert_eq!(
            (
                second.program_options.default_priority_class,
                second.priority_class_count,
                second.program_options.measures_service_times
            ),
            (1, 2, false)
        );
        assert_eq!(
            (
                second.outstanding_bounds_by_class(3).core_bounds_for_class(0),
                second.outstanding_bounds_by_class(3).core_bounds_for_class(1)
            ),
            (&[2, 2, 2][..], &[0, 2, 2][..])
        );
    }

    #[test]
    fn config_errors_name_line_key_and_expected_value() {
        let error_of_config =
            |extra_lines: &str| parse_dispatch_config(&format!("{DNS_SERVICE_CONFIG}{extra_lines}\n")).unwrap_err();
        assert_eq!(
            error_of_config("policy = \"jsk\""),
            "dispatch.toml:3:10: key `service.policy`: policy \"jsk\" is not known: expected \"random\", \"rr\", \
             \"jsq\", \"jlq\" or \"jbsrq\" (nearest: `jsq`)"
        );
        assert_eq!(
            error_of_config("bound = 0"),
            "dispatch.toml:3:9: key `service.bound`: 0: expected a whole number from 1 to 65535"
        );
        assert_eq!(
            error_of_config("response_timeout = \"60s\""),
            "dispatch.toml:3:20: key `service.response_timeout`: \"60s\": expected a time with its unit, from \
             \"100ms\" to \"20s\""
        );
        assert_eq!(
            error_of_config("request_id = { offset = 0, bytes = 9 }"),
            "dispatch.toml:3:36: key `service.request_id.bytes`: 9: expected a whole number from 1 to 8"
        );
        assert!(
            error_of_config("[[service.type]]\nvalue = 1")
                .contains("expected `value` if the service has a `type_field`")
        );
        assert!(error_of_config("[[service.type]]\nprefix = \"far too long\"").contains("expected 1 to 8 bytes"));
        assert!(
            error_of_config("type_field = { offset = 0, bytes = 1 }\n[[service.type]]\nvalue = 256")
                .contains("value = 256: expected a number of 1 bytes")
        );
        assert!(
            error_of_config(DNS_SERVICE_CONFIG).contains("key `service.listen`: 0.0.0.0:53 is listed twice"),
            "{}",
            error_of_config(DNS_SERVICE_CONFIG)
        );
        let class_error = error_of_config("[[service.type]]\nprefix = \"a\"\nclass = 4");
        assert!(class_error.ends_with("4: expected a whole number from 0 to 3"), "{class_error}");
        assert!(parse_dispatch_config("service = []\n").unwrap_err().contains("expected at least one [[service]]"));
        assert!(error_of_config("liste = 1").contains("key `service.liste`: is not known: expected one of `listen`"));
    }

    #[test]
    fn all_dispatch_config_mistakes_are_reported_at_once() {
        let invalid_config =
            "[[service]]\npolicy = \"x\"\n[[service.type]]\n[[service]]\nlisten = \"0.0.0.0:0\"\nbound = 0\n";
        let mistakes = parse_dispatch_config(invalid_config).unwrap_err();
        let mistake_positions: Vec<&str> = mistakes.lines().map(|line| line.split(": ").next().unwrap()).collect();
        assert_eq!(
            mistake_positions,
            ["1:1", "2:10", "3:1", "5:10", "6:9"].map(|position| format!("dispatch.toml:{position}")),
            "{mistakes}"
        );
    }
}
