//! MUNGE credentials through libmunge (LGPL, linked dynamically).
//!
//! The declarations are written by hand: libmunge's ABI has been the same since 0.5.8. Calls block until munged
//! answers; libmunge itself gives up after a few tries over some seconds. A caller with a deadline runs them in a
//! thread of their own.
//!
//! ```no_run
//! let credential = pliant_munge::encode(None, b"hello", Some(0), 30)?;
//! let decoded = pliant_munge::decode(None, &credential)?;
//! assert_eq!(decoded.payload, b"hello");
//! # Ok::<(), pliant_munge::MungeError>(())
//! ```

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::ptr;

/// Opaque, munge.h.
#[repr(C)]
struct Ctx {
    _opaque: [u8; 0],
}

const OPT_TTL: c_int = 4;
const OPT_ADDR4: c_int = 5;
const OPT_ENCODE_TIME: c_int = 6;
const OPT_DECODE_TIME: c_int = 7;
const OPT_SOCKET: c_int = 8;
const OPT_UID_RESTRICTION: c_int = 9;

const SUCCESS: c_int = 0;
const BAD_ARG: c_int = 2;
const NO_MEMORY: c_int = 5;
const SOCKET: c_int = 6;
const EXPIRED: c_int = 15;
const REWOUND: c_int = 16;
const REPLAYED: c_int = 17;
const UNAUTHORIZED: c_int = 18;

#[link(name = "munge")]
unsafe extern "C" {
    fn munge_encode(cred: *mut *mut c_char, ctx: *mut Ctx, buf: *const c_void, len: c_int) -> c_int;
    fn munge_decode(
        cred: *const c_char,
        ctx: *mut Ctx,
        buf: *mut *mut c_void,
        len: *mut c_int,
        uid: *mut u32,
        gid: *mut u32,
    ) -> c_int;
    fn munge_strerror(e: c_int) -> *const c_char;
    fn munge_ctx_create() -> *mut Ctx;
    fn munge_ctx_destroy(ctx: *mut Ctx);
    fn munge_ctx_strerror(ctx: *mut Ctx) -> *const c_char;
    fn munge_ctx_get(ctx: *mut Ctx, opt: c_int, ...) -> c_int;
    fn munge_ctx_set(ctx: *mut Ctx, opt: c_int, ...) -> c_int;
    fn free(p: *mut c_void);
}

/// Why there is no credential, or why one is refused. The text is munge's own.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MungeError {
    /// munged cannot be reached.
    Unreachable(String),
    /// Older than its time to live.
    Expired(String),
    /// From the future: the clocks of both hosts differ.
    Rewound(String),
    /// Decoded before.
    Replayed(String),
    /// Meant for another uid.
    Unauthorized(String),
    /// An argument that cannot be passed on: a NUL byte, a payload or a time to live that is too large.
    Argument(String),
    /// Anything else, with munge's number (`munge_err_t`).
    Other(i32, String),
}

impl std::fmt::Display for MungeError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        use MungeError::*;
        match self {
            Unreachable(text) | Expired(text) | Rewound(text) | Replayed(text) => f.write_str(text),
            Unauthorized(text) | Argument(text) | Other(_, text) => f.write_str(text),
        }
    }
}

impl std::error::Error for MungeError {}

/// What a credential proves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Decoded {
    /// Effective uid of the process that made it.
    pub uid: u32,
    /// Its effective gid.
    pub gid: u32,
    /// What it carries.
    pub payload: Vec<u8>,
    /// When it was made, Unix seconds by the maker's clock.
    pub encode_time: i64,
    /// When it was decoded, Unix seconds by the clock of this host.
    pub decode_time: i64,
    /// Time to live in seconds.
    pub ttl: u32,
    /// Address of the host that made it, as that host's munged knows it.
    pub address: std::net::Ipv4Addr,
}

/// Makes a credential for the caller's effective uid and gid. `socket`: munged's; `None` or empty: libmunge's own
/// default. `only_for`: the uid that may decode it. `ttl`: seconds, at least 1.
///
/// # Errors
/// munged is not there, or an argument is too large.
pub fn encode(socket: Option<&Path>, payload: &[u8], only_for: Option<u32>, ttl: u32) -> Result<String, MungeError> {
    let too_large = |what: &str| MungeError::Argument(format!("{what} is too large"));
    let ctx = Context::new(socket)?;
    let ttl = c_int::try_from(ttl.max(1)).map_err(|_| too_large("the time to live"))?;
    // SAFETY: the context is live; OPT_TTL takes an int.
    ctx.check(unsafe { munge_ctx_set(ctx.0, OPT_TTL, ttl) })?;
    if let Some(uid) = only_for {
        // SAFETY: the context is live; OPT_UID_RESTRICTION takes a uid_t.
        ctx.check(unsafe { munge_ctx_set(ctx.0, OPT_UID_RESTRICTION, uid) })?;
    }
    let length = c_int::try_from(payload.len()).map_err(|_| too_large("the payload"))?;
    let mut cred: *mut c_char = ptr::null_mut();
    // SAFETY: `cred` is a valid place for a pointer, the payload is readable for `length` bytes.
    let code = unsafe { munge_encode(&mut cred, ctx.0, payload.as_ptr().cast(), length) };
    let cred = Owned(cred.cast());
    ctx.check(code)?;
    if cred.0.is_null() {
        return Err(error(NO_MEMORY, None));
    }
    // SAFETY: on success munge gives a string that ends with NUL; it lives until `cred` is dropped.
    let text = unsafe { CStr::from_ptr(cred.0.cast()) };
    Ok(text.to_string_lossy().into_owned())
}

/// Checks a credential. Expired, rewound and replayed ones are errors, although libmunge would tell their content.
///
/// # Errors
/// The credential is not valid, not for this uid, or munged is not there.
pub fn decode(socket: Option<&Path>, credential: &str) -> Result<Decoded, MungeError> {
    let ctx = Context::new(socket)?;
    let credential =
        CString::new(credential).map_err(|_| MungeError::Argument("a credential with a NUL byte".into()))?;
    let (mut buf, mut length): (*mut c_void, c_int) = (ptr::null_mut(), 0);
    let (mut uid, mut gid) = (u32::MAX, u32::MAX);
    // SAFETY: all pointers are to live places of the declared types; the credential ends with NUL.
    let code = unsafe { munge_decode(credential.as_ptr(), ctx.0, &mut buf, &mut length, &mut uid, &mut gid) };
    // Before the check: munge gives a buffer for expired and replayed credentials too.
    let buf = Owned(buf);
    ctx.check(code)?;
    let length = usize::try_from(length).unwrap_or(0);
    let payload = if buf.0.is_null() || length == 0 {
        vec![]
    } else {
        // SAFETY: munge gives `length` readable bytes, freed when `buf` is dropped.
        unsafe { std::slice::from_raw_parts(buf.0.cast::<u8>(), length) }.to_vec()
    };
    let mut ttl: c_int = 0;
    // SAFETY: OPT_TTL takes a pointer to an int.
    ctx.check(unsafe { munge_ctx_get(ctx.0, OPT_TTL, &mut ttl as *mut c_int) })?;
    let mut address = [0u8; 4];
    // SAFETY: OPT_ADDR4 takes a pointer to a struct in_addr, four bytes in network order.
    ctx.check(unsafe { munge_ctx_get(ctx.0, OPT_ADDR4, address.as_mut_ptr()) })?;
    Ok(Decoded {
        uid,
        gid,
        payload,
        encode_time: ctx.time(OPT_ENCODE_TIME)?,
        decode_time: ctx.time(OPT_DECODE_TIME)?,
        ttl: u32::try_from(ttl).unwrap_or(0),
        address: address.into(),
    })
}

struct Context(*mut Ctx);

impl Context {
    fn new(socket: Option<&Path>) -> Result<Context, MungeError> {
        // SAFETY: no preconditions.
        let ctx = Context(unsafe { munge_ctx_create() });
        if ctx.0.is_null() {
            return Err(error(NO_MEMORY, None));
        }
        if let Some(socket) = socket.filter(|s| !s.as_os_str().is_empty()) {
            let path = CString::new(socket.as_os_str().as_bytes())
                .map_err(|_| MungeError::Argument("munged's socket has a NUL byte in its path".into()))?;
            // SAFETY: OPT_SOCKET takes a string that ends with NUL, which munge copies.
            ctx.check(unsafe { munge_ctx_set(ctx.0, OPT_SOCKET, path.as_ptr()) })?;
        }
        Ok(ctx)
    }

    fn check(&self, code: c_int) -> Result<(), MungeError> {
        if code == SUCCESS {
            return Ok(());
        }
        // SAFETY: the context is live; the string (or null) belongs to it and is copied below.
        let text = unsafe { munge_ctx_strerror(self.0) };
        if text.is_null() {
            return Err(error(code, None));
        }
        // SAFETY: not null, ends with NUL, lives as long as the context.
        let text = unsafe { CStr::from_ptr(text) };
        let text = Some(text.to_string_lossy().into_owned());
        Err(error(code, text))
    }

    fn time(&self, opt: c_int) -> Result<i64, MungeError> {
        let mut time: i64 = 0;
        // SAFETY: OPT_*_TIME take a pointer to a time_t, 64 bits on every Linux that Pliant is built for.
        self.check(unsafe { munge_ctx_get(self.0, opt, &mut time as *mut i64) })?;
        Ok(time)
    }
}

// A 32-bit time_t would be overrun by the store above.
#[cfg(not(target_pointer_width = "64"))]
compile_error!("pliant-munge needs a 64-bit target");

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by munge_ctx_create, or null, which munge accepts.
        unsafe { munge_ctx_destroy(self.0) }
    }
}

/// Memory that munge allocated with malloc.
struct Owned(*mut c_void);

impl Drop for Owned {
    fn drop(&mut self) {
        // SAFETY: allocated by malloc in libmunge, or null.
        unsafe { free(self.0) }
    }
}

fn error(code: c_int, text: Option<String>) -> MungeError {
    let text = text.unwrap_or_else(|| {
        // SAFETY: gives a static string for every number.
        let text = unsafe { munge_strerror(code) };
        if text.is_null() {
            return format!("munge error {code}");
        }
        // SAFETY: not null, static, ends with NUL.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    });
    match code {
        BAD_ARG => MungeError::Argument(text),
        SOCKET => MungeError::Unreachable(text),
        EXPIRED => MungeError::Expired(text),
        REWOUND => MungeError::Rewound(text),
        REPLAYED => MungeError::Replayed(text),
        UNAUTHORIZED => MungeError::Unauthorized(text),
        _ => MungeError::Other(code, text),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_munged_is_named() {
        let e = encode(Some(Path::new("/nonexistent/munge.socket")), b"x", None, 1).unwrap_err();
        assert!(matches!(&e, MungeError::Unreachable(text) if text.contains("/nonexistent/munge.socket")), "{e:?}");
        let e = decode(Some(Path::new("/nonexistent/munge.socket")), "MUNGE:x:").unwrap_err();
        assert!(matches!(e, MungeError::Unreachable(_)), "{e:?}");
    }

    #[test]
    fn nul_bytes_are_refused() {
        assert!(matches!(decode(None, "a\0b"), Err(MungeError::Argument(_))));
        assert!(matches!(encode(Some(Path::new("a\0b")), b"", None, 1), Err(MungeError::Argument(_))));
    }
}
