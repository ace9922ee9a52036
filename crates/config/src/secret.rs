//! Secrets stand in files of their own, which only their owner can read, and are never printed.

use std::fmt;
use std::io::Read as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::str::FromStr;
use std::sync::atomic::{AtomicBool, Ordering};

use serde_json::{Value, json};
use toml::Spanned;
use toml::de::DeValue;

use crate::{FromToml, Reader};

/// What a key ending in `_file` names: the secret in that file.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret<T>(T);

/// A secret that is written as text. (What its own error would say is not shown: it may quote the secret.)
pub trait SecretText: FromStr {
    /// What the file must hold.
    const EXPECTED: &'static str;
}

impl<T> Secret<T> {
    /// From elsewhere than a file.
    pub fn new(secret: T) -> Self {
        Self(secret)
    }

    /// The secret itself: not for logs or answers.
    pub fn expose(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

/// What a secret file may hold at most, bytes.
const LARGEST: u64 = 65_536;

/// Whether secrets of other users are refused.
static STRICT: AtomicBool = AtomicBool::new(false);

/// From now on secret files must be this user's or root's: whoever owns one knows it, and can change it. For daemons; commands of root
/// look at files of daemons that run as somebody else.
pub fn refuse_others_secrets() {
    STRICT.store(true, Ordering::Relaxed);
}

/// The text of a secret file, without blanks around it.
///
/// # Errors
/// When it cannot be read, others than its owner can read it, or it is somebody else's ([`refuse_others_secrets`]), in words.
pub fn read_secret(path: &Path) -> Result<String, String> {
    read_secret_of(path, STRICT.load(Ordering::Relaxed))
}

/// The same; `strict`: whether secrets of other users are refused.
pub(crate) fn read_secret_of(path: &Path, strict: bool) -> Result<String, String> {
    let shown = path.display();
    let unreadable = |reason: std::io::Error| format!("{shown}: {reason}: expected a readable file with the secret");
    let file = std::fs::File::open(path).map_err(unreadable)?;
    // Of the open file: whoever renames another one into its place meanwhile changes nothing.
    let metadata = file.metadata().map_err(unreadable)?;
    if metadata.is_dir() {
        return Err(format!("{shown} is a directory: expected a readable file with the secret"));
    }
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & 0o077 != 0 {
        return Err(format!("others can read or write {shown} (mode {mode:04o}): expected `chmod 600 {shown}`"));
    }
    let (owner, own) = (metadata.uid(), nix::unistd::geteuid().as_raw());
    if strict && owner != own && owner != 0 {
        return Err(format!(
            "{shown} belongs to user {owner}: expected user {own}, as which this runs, or root (chown)"
        ));
    }
    let mut text = String::new();
    file.take(LARGEST).read_to_string(&mut text).map_err(unreadable)?;
    Ok(text.trim().to_owned())
}

impl<T: SecretText> FromToml for Secret<T> {
    fn read(value: &Spanned<DeValue<'_>>, reader: &mut Reader<'_>) -> Option<Self> {
        let DeValue::String(name) = value.get_ref() else { return reader.wrong_type::<Self>(value) };
        let path = reader.beside(Path::new(name.as_ref()));
        let secret = read_secret(&path).and_then(|text| {
            let wrong = |_| format!("{} holds something else: expected {}", path.display(), T::EXPECTED);
            text.parse::<T>().map_err(wrong)
        });
        reader.taken(secret, value.span()).map(Self)
    }

    fn expected() -> String {
        "the name of a file that holds the secret, relative to this one".to_owned()
    }

    fn schema() -> Value {
        json!({ "type": "string" })
    }
}
