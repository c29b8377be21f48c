"""Probe: folded runs through ring and whole_set, against the families chosen before."""
import sys, time, statistics, json, os
import torch, torch.nn.functional as F
from onepass.bench import timing
from onepass.core.device import describe
from onepass.core import norms
from onepass.core.problem import bind
from onepass.planning.choose import plan
from onepass.planning.options import Options
from onepass.planning.registry import family_named
from onepass.backends.gpu.ring import schedule as R
from onepass.backends.gpu.whole_set import schedule as W
from dataclasses import replace
DEV = os.environ.get("DEV", "cuda")
def _device():
    if DEV == "cuda": return describe(torch.device("cuda"))
    from onepass.core.device import KNOWN_DEVICES
    return KNOWN_DEVICES["h200"]
D = _device()
def launch(problem, fam, ls): return family_named(fam).infer(problem, ls)
def ln(M,N,dt=torch.bfloat16,pd=None,rms=False):
    x=torch.randn(M,N,device=DEV,dtype=dt)+1; w=torch.randn(N,device=DEV,dtype=pd or dt); b=None if rms else torch.randn(N,device=DEV,dtype=pd or dt)
    s=norms.rms_norm(1,1e-6) if rms else norms.layer_norm(1)
    ref=(lambda v: F.rms_norm(v.double(),(N,),w.double(),1e-6)) if rms else (lambda v:F.layer_norm(v.double(),(N,),w.double(),b.double()))
    return f"{'RMS' if rms else 'LN'} {M}x{N} {dt}".replace('torch.',''), s,x,w,b,ref
def gn(*shape,g=32,dt=torch.float16):
    x=torch.randn(shape,device=DEV,dtype=dt)+1; w=torch.randn(shape[1],device=DEV,dtype=dt); b=torch.randn(shape[1],device=DEV,dtype=dt)
    s=replace(norms.group_norm(g),activation="silu")
    return f"GN {'x'.join(map(str,shape))}", s,x,w,b,lambda v:F.silu(F.group_norm(v.double(),g,w.double(),b.double()))
def check(y,x,ref):
    for sl in (slice(0,1),slice(x.shape[0]-1,x.shape[0])):
        e=ref(x[sl]); a=y[sl].double(); err=(a-e).abs(); tol=(1.6e-2 if x.dtype==torch.bfloat16 else 2e-3 if x.dtype==torch.float16 else 1e-4)
        bad=(err>tol*(1+e.abs())).sum().item()
        if bad or not torch.isfinite(a).all(): return f"WRONG {bad} max {err.max().item():.3g}"
    return ""
def torn(y,good): return "" if torch.equal(y,good) else "DIFFERS"
def tell(l):
    return f"{l.block_i}x{l.block_j} m{l.members} t{getattr(l,'tiles','')} s{getattr(l,'slots','')} k{int(getattr(l,'kept',0))}"
def run(case, configs):
    name,s,x,w,b,ref=case
    p=bind(s,x,w,b)
    y=torch.empty_like(x); fns=[lambda:y.copy_(x)]; labels=["copy"]
    pb=sum(t.numel()*t.element_size() for t in (w,b) if t is not None); share=(2*x.numel()*x.element_size()+pb)/(2*x.numel()*x.element_size())
    for lab,fam,ls in configs(p):
        try:
            f=launch(p,fam,ls); out=f(x,w,b,None,None); torch.cuda.synchronize(); bad=check(out,x,ref)
            if bad: print(name,lab,bad,flush=True); continue
            fns.append(lambda f=f:f(x,w,b,None,None)); labels.append(lab)
        except Exception as e: print(name,lab,type(e).__name__,str(e)[:200].replace("\n"," "),flush=True)
    with timing.capturable_stream("cuda"):
        t=timing.device_times([fns[0]]+[timing.capture(f)[0] for f in fns[1:]],12)
    c=t[0].median
    print(f"{name:28} copy {c*1e6:8.1f} | "+" | ".join(f"{l} {v.median*1e6:.1f} ({c*share/v.median:.2f})" for l,v in zip(labels[1:],t[1:])),flush=True)
def default(p):
    keep=W.SHORTEST; W.SHORTEST=2**40
    old=plan(p,replace(D,no_ring="x")); W.SHORTEST=keep
    yield "old:"+old.family, old.family, old.launches
def best(p):
    r=R.ring_unsupported(p,D)
    if not r:
        ls=R.ring_launches(p,D,False); yield "ring "+tell(ls[0]),"ring",ls
    else: print(r)
    if not W.whole_set_unsupported(p,D):
        ls=W.whole_set_launches(p,D,False); l=ls[0]; yield f"whole m{l.members} v{l.vectors}x{l.block_j} th{l.block_i}","whole_set",ls
def variants(p):
    """Ring candidates: all tiles with the planner's other choices."""
    from onepass.backends.gpu.walk import walk
    w=walk(p); (b,)=R.ring_launches(p,D,False); seen=0
    for l in R._candidates(p,w,D):
        if l.kept==b.kept and not l.back and (l.block_i==b.block_i or l.tiles in(4,8)) and l.programs>=0.9*D.sms and l.blocks*2<=l.slots+2 and l.units>=l.teams and l!=b and seen<7:
            seen+=1; yield "ring "+tell(l),"ring",(l,)
def both(p):
    yield from default(p); yield from best(p)
def wide(p):
    yield from both(p); yield from variants(p)

def precompile(job):
    """In another process: compile all kernels of one case."""
    global DEV, D
    name, args, kw, cname, device, target = job
    DEV, D = "meta", device
    from onepass.backends.gpu.forward import kernels
    from benchmarks.precompile import build
    _,s,x,w,b,_ = globals()[name](*args,**kw)
    p=bind(s,x,w,b)
    for _,fam,ls in globals()[cname](p):
        for k in kernels(p,ls,False):
            try: build(k.source(),target)
            except Exception as e: return f"{name}{args} {str(e)[:200]}"
    return ""

import gc
end=time.time()+float(sys.argv[1])
todo=[(gn,(8,512,256,256),{},wide),(ln,(1024,131072),{"rms":True},wide),(gn,(64,512,64,64),{},wide),(gn,(1,128,1024,1024),{},both),(gn,(2,512,256,256),{},both),(gn,(16,320,64,64),{},wide),(gn,(12,1920,40,40),{},wide),(gn,(2,640,128,128),{},both),(ln,(1,16777216),{},both),(ln,(512,262144),{"rms":True},both)]
if __name__=="__main__":
  from benchmarks.precompile import new_pool
  from triton.runtime import driver
  os.environ["DEV"]="meta"; t=time.time(); pool=new_pool(15); target=driver.active.get_current_target()
  print([e for e in pool.map(precompile,[(f.__name__,a,k,c.__name__,D,target) for f,a,k,c in todo]) if e], f"compiled in {time.time()-t:.0f} s",flush=True)
  for f,a,k,c in todo:
    if time.time()>end: print("time is up"); break
    run(f(*a,**k),c); gc.collect(); torch.cuda.empty_cache()
