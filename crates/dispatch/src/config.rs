//! The file of `coreward dispatch`; docs/dispatch.md is the reference for users.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::time::Duration;

use coreward_config::{ConfigError, Source, Spanned};
use coreward_dataplane::dispatch::{
    self, LONGEST_RESPONSE_TIMEOUT, LOOK_INTERVAL, MAX_CLASSES, MAX_TYPES, MAX_WORKERS, Options, Patience, Policy,
    RequestType,
};
use coreward_model::dispatch::{ClassBounds, Weight};
use serde::de::{Deserialize, Deserializer, Error as _};

/// Where pins are when nothing is said.
pub const PIN_DIRECTORY: &str = "/sys/fs/bpf/coreward/dispatch";

/// Everything.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Config {
    /// A directory in a BPF file system: what packets need lives there and outlives the daemon.
    pub pin_directory: PathBuf,
    /// A directory of a cgroup2 file system that all workers are in or below; without it its root.
    pub cgroup: Option<PathBuf>,
    /// At least one.
    pub services: Vec<Service>,
}

/// One service.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Service {
    /// For the program.
    pub options: Options,
    /// For user space.
    pub patience: Patience,
    /// Of each type, then of all others; `None`: learned.
    pub expected: Vec<Option<Duration>>,
    /// See [`Service::bounds`].
    bound: u32,
    reserved: u16,
    reserved_bound: u32,
    classes: u8,
}

impl Service {
    /// With nothing but an address and a policy.
    pub fn new(listen: SocketAddr, policy: Policy) -> Self {
        Self {
            options: Options {
                service: listen,
                policy,
                request_id: None,
                type_offset: 0,
                types: Vec::new(),
                other_class: 0,
                learn: policy == Policy::LightestQueue,
            },
            patience: Patience::default(),
            expected: vec![None],
            bound: DEFAULT_BOUND,
            reserved: DEFAULT_RESERVED,
            reserved_bound: 0,
            classes: 1,
        }
    }

    /// How many requests of each class a worker may have outstanding, with so many workers.
    pub fn bounds(&self, workers: u16) -> ClassBounds {
        ClassBounds::reserving(workers, self.classes, self.reserved, self.bound, self.reserved_bound)
    }
}

/// As RingLeader's queues are (NSDI'23, Sect. 7.1).
const DEFAULT_BOUND: u32 = 4;
/// Where there is more than one class.
const DEFAULT_RESERVED: u16 = 1;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    pin_directory: Option<PathBuf>,
    cgroup: Option<PathBuf>,
    service: Vec<ServiceTable>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct ServiceTable {
    listen: Spanned<SocketAddr>,
    #[serde(default = "default_policy")]
    policy: PolicyName,
    bound: Option<Spanned<u32>>,
    reserved: Option<Spanned<u16>>,
    reserved_bound: Option<Spanned<u32>>,
    response_timeout_ms: Option<Spanned<u64>>,
    stall_after_ms: Option<Spanned<u64>>,
    request_id: Option<Spanned<FieldTable>>,
    type_field: Option<Spanned<FieldTable>>,
    #[serde(default)]
    other: OtherTable,
    #[serde(default, rename = "type")]
    types: Vec<Spanned<TypeTable>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct FieldTable {
    offset: u16,
    response_offset: Option<u16>,
    bytes: u8,
    #[serde(default)]
    little_endian: bool,
}

#[derive(Default, serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct OtherTable {
    expected_us: Option<Spanned<f64>>,
    class: Option<Spanned<u8>>,
}

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct TypeTable {
    value: Option<u64>,
    prefix: Option<String>,
    expected_us: Option<Spanned<f64>>,
    class: Option<Spanned<u8>>,
}

struct PolicyName(Policy);

fn default_policy() -> PolicyName {
    PolicyName(Policy::ShortestQueue)
}

impl<'de> Deserialize<'de> for PolicyName {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map(Self).map_err(D::Error::custom)
    }
}

impl Config {
    /// # Errors
    /// When the file cannot be read or something in it is wrong.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        Self::parse(&Source::read(path)?)
    }

    /// # Errors
    /// When something in the text is wrong.
    pub fn parse(source: &Source) -> Result<Self, ConfigError> {
        let file: File = source.parse()?;
        let mut services: Vec<Service> = Vec::new();
        for table in &file.service {
            let listen = *table.listen.get_ref();
            if services.iter().any(|service| service.options.service == listen) {
                return Err(source.error(table.listen.span(), &format!("{listen} is listed twice")));
            }
            services.push(Reader { source }.service(table)?);
        }
        if services.is_empty() {
            return Err(source.error(0..0, "no service: expected at least one [[service]]"));
        }
        let pin_directory = file.pin_directory.unwrap_or_else(|| PIN_DIRECTORY.into());
        Ok(Self { pin_directory, cgroup: file.cgroup, services })
    }
}

struct Reader<'a> {
    source: &'a Source,
}

impl Reader<'_> {
    fn service(&self, table: &ServiceTable) -> Result<Service, ConfigError> {
        let listen = *table.listen.get_ref();
        if listen.port() == 0 {
            return Err(self.source.error(table.listen.span(), &format!("{listen}: expected a port from 1 to 65535")));
        }
        let mut service = Service::new(listen, table.policy.0);
        service.bound = self.number(&table.bound, 1..=65535)?.unwrap_or(DEFAULT_BOUND);
        service.reserved = self.number(&table.reserved, 0..=MAX_WORKERS as u16 - 1)?.unwrap_or(DEFAULT_RESERVED);
        service.reserved_bound = self.number(&table.reserved_bound, 0..=65535)?.unwrap_or(0);
        let look_ms = LOOK_INTERVAL.as_millis() as u64;
        let longest_ms = LONGEST_RESPONSE_TIMEOUT.as_millis() as u64;
        if let Some(ms) = self.number(&table.response_timeout_ms, look_ms..=longest_ms)? {
            service.patience.response_timeout = Duration::from_millis(ms);
        }
        if let Some(ms) = self.number(&table.stall_after_ms, look_ms..=3_600_000)? {
            service.patience.stall_after = Duration::from_millis(ms);
        }
        if let Some(id) = &table.request_id {
            let field = self.field(id)?;
            let response_offset = field.response_offset.unwrap_or(field.offset);
            service.options.request_id =
                Some(dispatch::RequestId { offset: field.offset, response_offset, bytes: field.bytes });
        }
        self.types(table, &mut service)?;
        Ok(service)
    }

    fn types(&self, table: &ServiceTable, service: &mut Service) -> Result<(), ConfigError> {
        let field = table.type_field.as_ref().map(|field| self.field(field)).transpose()?;
        if let Some(beyond) = table.types.get(MAX_TYPES) {
            return Err(self.source.error(beyond.span(), &format!("expected at most {MAX_TYPES} types")));
        }
        service.options.type_offset = field.map_or(0, |field| field.offset);
        service.expected.clear();
        for spanned in &table.types {
            let kind = spanned.get_ref();
            let (value, mask) = matched(kind, field).map_err(|message| self.source.error(spanned.span(), &message))?;
            let class = self.number(&kind.class, 0..=MAX_CLASSES as u8 - 1)?.unwrap_or(0);
            service.options.types.push(RequestType { value, mask, class });
            service.expected.push(self.time(&kind.expected_us)?);
        }
        let highest_class = |types: &[RequestType]| types.iter().map(|kind| kind.class).max().unwrap_or(0);
        let lowest = highest_class(&service.options.types);
        // What nobody named has the lowest priority of all.
        service.options.other_class = self.number(&table.other.class, 0..=MAX_CLASSES as u8 - 1)?.unwrap_or(lowest);
        service.expected.push(self.time(&table.other.expected_us)?);
        service.classes = lowest.max(service.options.other_class) + 1;
        service.options.learn =
            service.options.policy == Policy::LightestQueue && service.expected.iter().any(Option::is_none);
        Ok(())
    }

    fn field<'a>(&self, field: &'a Spanned<FieldTable>) -> Result<&'a FieldTable, ConfigError> {
        let (bytes, offset) = (field.get_ref().bytes, field.get_ref().offset);
        if !(1..=8).contains(&bytes) {
            return Err(self.source.error(field.span(), &format!("bytes = {bytes}: expected 1 to 8")));
        }
        if offset > LARGEST_OFFSET {
            return Err(self.source.error(field.span(), &format!("offset = {offset}: expected 0 to {LARGEST_OFFSET}")));
        }
        Ok(field.get_ref())
    }

    fn number<T: Copy + PartialOrd + std::fmt::Display>(
        &self,
        given: &Option<Spanned<T>>,
        range: RangeInclusive<T>,
    ) -> Result<Option<T>, ConfigError> {
        let Some(given) = given else { return Ok(None) };
        let number = *given.get_ref();
        if range.contains(&number) {
            return Ok(Some(number));
        }
        let message = format!("{number}: expected {} to {}", range.start(), range.end());
        Err(self.source.error(given.span(), &message))
    }

    fn time(&self, us: &Option<Spanned<f64>>) -> Result<Option<Duration>, ConfigError> {
        let us = self.number(us, 0.001..=Weight::LONGEST.as_micros() as f64)?;
        Ok(us.map(|us| Duration::from_nanos((us * 1e3) as u64)))
    }
}

/// No UDP payload is longer.
const LARGEST_OFFSET: u16 = 65_500;

type Bytes = [u8; 8];

/// The bytes of a type and which of them count.
fn matched(kind: &TypeTable, field: Option<&FieldTable>) -> Result<(Bytes, Bytes), String> {
    let (mut value, mut mask) = (Bytes::default(), Bytes::default());
    match (kind.value, &kind.prefix, field) {
        (Some(number), None, Some(field)) => {
            let width = usize::from(field.bytes);
            if width < 8 && number >> (width * 8) != 0 {
                return Err(format!("value = {number}: expected a number of {width} bytes, as `type_field` says"));
            }
            if field.little_endian {
                value[..width].copy_from_slice(&number.to_le_bytes()[..width]);
            } else {
                value[..width].copy_from_slice(&number.to_be_bytes()[8 - width..]);
            }
            mask[..width].fill(0xff);
        }
        (None, Some(prefix), None) => {
            let text = prefix.as_bytes();
            if text.is_empty() || text.len() > value.len() {
                return Err(format!("prefix = {prefix:?}: expected 1 to {} bytes", value.len()));
            }
            value[..text.len()].copy_from_slice(text);
            mask[..text.len()].fill(0xff);
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
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(&Source::from_text("dispatch.toml", text)).map_err(|error| error.to_string())
    }

    const DNS: &str = "[[service]]\nlisten = \"0.0.0.0:53\"\n";

    #[test]
    fn an_address_is_enough() {
        let config = parse(DNS).unwrap();
        assert_eq!(config.pin_directory, Path::new(PIN_DIRECTORY));
        assert_eq!(config.services, [Service::new("0.0.0.0:53".parse().unwrap(), Policy::ShortestQueue)]);
        assert_eq!(config.services[0].bounds(3).of(0), [4, 4, 4]);
    }

    #[test]
    fn types_by_number_and_by_text() {
        let config = parse(
            r#"
[[service]]
listen = "10.0.0.1:4000"
policy = "jlq"
type_field = { offset = 3, bytes = 2 }
request_id = { offset = 0, bytes = 2, response_offset = 4 }
other = { expected_us = 7.5 }
[[service.type]]
value = 258
expected_us = 100
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
"#,
        )
        .unwrap();
        let [first, second] = &config.services[..] else { panic!("{config:?}") };
        assert_eq!((first.options.type_offset, first.options.learn), (3, false));
        assert_eq!(first.options.types[0].value, [1, 2, 0, 0, 0, 0, 0, 0]);
        assert_eq!(first.options.types[0].mask, [255, 255, 0, 0, 0, 0, 0, 0]);
        assert_eq!(first.expected, [Some(Duration::from_micros(100)), Some(Duration::from_nanos(7500))]);
        let id = dispatch::RequestId { offset: 0, response_offset: 4, bytes: 2 };
        assert_eq!(first.options.request_id, Some(id));
        assert_eq!(&second.options.types[0].value, b"get \0\0\0\0");
        assert_eq!((second.options.other_class, second.classes, second.options.learn), (1, 2, false));
        assert_eq!((second.bounds(3).of(0), second.bounds(3).of(1)), (&[2, 2, 2][..], &[0, 2, 2][..]));
    }

    #[test]
    fn errors_name_line_key_and_what_was_expected() {
        let error = |rest: &str| parse(&format!("{DNS}{rest}\n")).unwrap_err();
        assert_eq!(
            error("policy = \"jsk\""),
            "dispatch.toml:3:10: key `service.policy`: policy \"jsk\": expected one of random, rr, jsq, jlq, jbsrq"
        );
        assert_eq!(error("bound = 0"), "dispatch.toml:3:9: key `service.bound`: 0: expected 1 to 65535");
        assert_eq!(
            error("response_timeout_ms = 60000"),
            "dispatch.toml:3:23: key `service.response_timeout_ms`: 60000: expected 100 to 20000"
        );
        assert_eq!(
            error("request_id = { offset = 0, bytes = 9 }"),
            "dispatch.toml:3:14: key `service.request_id`: bytes = 9: expected 1 to 8"
        );
        assert!(error("[[service.type]]\nvalue = 1").contains("expected `value` if the service has a `type_field`"));
        assert!(error("[[service.type]]\nprefix = \"far too long\"").contains("expected 1 to 8 bytes"));
        assert!(
            error("type_field = { offset = 0, bytes = 1 }\n[[service.type]]\nvalue = 256")
                .contains("value = 256: expected a number of 1 bytes")
        );
        assert!(error(DNS).contains("key `service.listen`: 0.0.0.0:53 is listed twice"), "{}", error(DNS));
        assert!(error("[[service.type]]\nprefix = \"a\"\nclass = 4").ends_with("4: expected 0 to 3"));
        assert!(parse("service = []\n").unwrap_err().contains("expected at least one [[service]]"));
        assert!(error("liste = 1").contains("unknown field `liste`, expected one of `listen`"));
    }
}
